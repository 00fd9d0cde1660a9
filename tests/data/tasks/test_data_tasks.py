"""Test length tasks: every answer against an independent solver, options, and samples."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import builtin
from megatron.data.errors import DataExhausted, TaskError, TokenizerError
from megatron.data.samples.loader import TrainLoader
from megatron.data.tasks.registry import TASKS, build_task
from megatron.data.tasks.samples import TaskSamples, examples_at


def plain(row: np.ndarray) -> np.ndarray:
    """Return the ids of a row, in which tokens that are no answer stand as ~id."""
    return np.where(row < 0, -1 - row, row)


def halves(task, row: np.ndarray) -> tuple[list[str], list[str]]:
    """Return the words before and after `=`, after checking that only the latter are answers."""
    words = task.tokenizer.decode(plain(row)).split()
    at = words.index("=")
    assert (row[: at + 1] < 0).all() and (row[at + 1 :] >= 0).all()
    return words[:at], words[at + 1 :]


def number(digits: list[str], base: int) -> int:
    return sum(int(digit) * base**place for place, digit in enumerate(reversed(digits)))


def solve_modular(words: list[str], modulus: int) -> list[str]:
    nested = words[0]
    found = [nested]
    for sign, value in zip(words[1::2], words[2::2], strict=True):
        nested = f"({nested}){sign}{value}"
        found.append(str(eval(nested) % modulus))
    return found


drawn = st.tuples(st.integers(0, 2**32), st.integers(1, 30))


def row_of(task, where: tuple[int, int]) -> np.ndarray:
    seed, length = where
    return task.row(np.random.default_rng(seed), length)


@pytest.mark.parametrize("name", ["copy", "reverse", "sort", "unique_copy"])
@given(where=drawn, symbols=st.integers(2, 30))
def test_rearranged_rows(name, where, symbols):
    unique = name == "unique_copy"
    task = build_task(name, {"symbols": symbols + 30 * unique, "max_length": 2})
    asked, answer = halves(task, row_of(task, where))
    assert len(asked) == where[1] and all(0 <= int(word) < task.symbols for word in asked)
    assert not unique or len(set(asked)) == len(asked)
    if name == "sort":
        assert Counter(asked) == Counter(answer)
        assert all(int(a) <= int(b) for a, b in zip(answer, answer[1:], strict=False))
    else:
        assert answer == (asked[::-1] if name == "reverse" else asked)


@given(where=drawn, steps=st.booleans())
def test_parity(where, steps):
    task = build_task("parity", {"steps": steps})
    asked, answer = halves(task, row_of(task, where))
    assert len(asked) == where[1] and set(asked) <= {"0", "1"}
    expected = [str(asked[: i + 1].count("1") % 2) for i in range(len(asked))]
    assert answer == (expected if steps else expected[-1:])


@given(where=drawn, modulus=st.integers(2, 9), steps=st.booleans())
def test_modular(where, modulus, steps):
    task = build_task("modular", {"modulus": modulus, "steps": steps})
    asked, answer = halves(task, row_of(task, where))
    assert len(asked) == 2 * where[1] - 1
    expected = solve_modular(asked, modulus)
    assert answer == (expected if steps else expected[-1:])


@given(where=drawn, base=st.integers(2, 16), reverse=st.booleans())
def test_addition(where, base, reverse):
    task = build_task("addition", {"base": base, "reverse": reverse})
    asked, answer = halves(task, row_of(task, where))
    plus = asked.index("+")
    terms = [asked[:plus], asked[plus + 1 :], answer]
    assert list(map(len, terms)) == [where[1], where[1], where[1] + 1]
    x, y, z = (number(term[::-1] if reverse else term, base) for term in terms)
    assert x + y == z


@given(where=drawn, values=st.integers(2, 9))
def test_mqar(where, values):
    task = build_task("mqar", {"keys": 32, "values": values})
    row = row_of(task, where)
    words, length = task.tokenizer.decode(plain(row)).split(), where[1]
    pairs, asked = words[: 2 * length], words[2 * length + 1 :]
    known = dict(zip(pairs[::2], pairs[1::2], strict=True))
    assert len(known) == length and words[2 * length] == "="
    assert dict(zip(asked[::2], asked[1::2], strict=True)) == known
    assert len(asked) == len(pairs) and (length < 10 or asked != pairs)
    answers = row >= 0
    assert not answers[: 2 * length + 1].any()
    assert (answers[2 * length + 1 :] == [False, True] * length).all()


@pytest.mark.parametrize("name", TASKS)
def test_samples_depend_on_seed_split_and_number_alone(name):
    task = build_task(name, {"min_length": 2, "max_length": 5})
    width = task.width(5)
    samples = TaskSamples(task, 40, width + 3, 7, "train")
    rows = samples.batch(range(40))
    assert (samples.batch([33, 2]) == rows[[33, 2]]).all()
    assert (TaskSamples(task, 8, width + 3, 7, "train", 50).batch(range(40)) == rows).all()
    for other in (
        TaskSamples(task, 40, width + 3, 8, "train"),
        TaskSamples(task, 40, 30, 7, "test"),
    ):
        assert (other.batch(range(40))[:, :4] != rows[:, :4]).any()
    lengths = Counter()
    for row in rows:
        used = np.flatnonzero(row != ~task.tokenizer.eod)[-1] + 1
        lengths[used] += 1
        assert (row[used:] == ~0).all() and row[used - 1] >= 0
    assert sorted(lengths) == [task.width(length) for length in range(2, 6)]
    assert len(np.unique(plain(rows), axis=0)) > 20
    with pytest.raises(DataExhausted, match="sample 40 of 40"):
        samples.batch([40])


def test_two_ranks_read_the_samples_of_one():
    samples = TaskSamples(build_task("copy", {}), 24, 40, 1, "train")
    alone = next(TrainLoader(samples, 8, 8))
    ranks = [next(TrainLoader(samples, 8, 4, rank, 2, vocab_size=12)) for rank in range(2)]
    assert (np.concatenate(ranks) == alone).all()


@pytest.mark.parametrize("name", TASKS)
def test_examples_of_one_length_are_fixed(name):
    task = build_task(name, {})
    rows = examples_at(task, 9, 30)
    assert rows.shape == (30, task.width(9))
    assert (rows == examples_at(build_task(name, {"max_length": 50}), 9, 30)).all()
    assert (rows[:10] == examples_at(task, 9, 10)).all()


def test_the_identity_changes_with_options_and_content(monkeypatch):
    first = build_task("copy", {}).identity()
    assert first["task"] == "copy" and first["options"]["max_length"] == 20
    assert build_task("copy", {"symbols": 11}).identity()["content"] != first["content"]
    monkeypatch.setattr(TASKS["copy"], "rearranged", lambda self, drawn: drawn[::-1])
    assert build_task("copy", {}).identity()["content"] != first["content"]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("kopy", {}, "data_path: no task is called 'kopy'; did you mean copy? known: addition, "),
        ("copy", {"max_lenght": 3}, "copy has no option 'max_lenght'; did you mean max_length? "),
        ("copy", {1: 3}, "copy has no option 1; known: min_length, max_length, symbols"),
        ("copy", {"keys": 3}, "copy has no option 'keys'; known: min_length, max_length, symbols"),
        ("copy", {"max_length": 0}, "task_options.max_length: 0 is not a whole number of at least"),
        ("copy", {"max_length": True}, "True is not a whole number of at least 1"),
        ("copy", {"max_length": 2.5}, "2.5 is not a whole number of at least 1"),
        ("sort", {"symbols": 1}, "symbols: 1 is not a whole number of at least 2"),
        ("parity", {"steps": 1}, "task_options.steps: 1 is not true or false"),
        ("parity", {"min_length": 21}, "min_length 21 is above max_length 20; raise max_length"),
        ("mqar", {"max_length": 65}, "mqar has no examples of length 65: task_options.keys is 64"),
        (
            "unique_copy",
            {"symbols": 19},
            "unique_copy has no examples of length 20: task_options.symbols is 19; lower",
        ),
    ],
)
def test_mistakes_in_options(name, options, text):
    with pytest.raises(TaskError) as raised:
        build_task(name, options)
    assert text in str(raised.value)


def test_lengths_that_do_not_fit():
    with pytest.raises(TaskError, match=r"copy of length 20 has 40 inputs; write seq_length: 40,"):
        TaskSamples(build_task("copy", {}), 4, 39, 0, "valid")
    with pytest.raises(
        TaskError, match=r"mqar has no .* 65: task_options.keys is 64; lower the lengths"
    ):
        examples_at(build_task("mqar", {}), 65, 2)


def test_the_tokenizer_reads_what_it_writes():
    tokenizer = build_task("mqar", {}).tokenizer
    ids = np.arange(tokenizer.vocab_size)
    text = tokenizer.decode(ids)
    assert text.startswith(" <|endoftext|> = k0 k1") and text.endswith(" v15")
    assert (tokenizer.encode(text) == ids).all() and tokenizer.decode([999]) == "\ufffd"
    assert tokenizer.token_bytes(ids[1:3]).tolist() == [2, 3]
    assert tokenizer.fingerprint() != build_task("copy", {}).tokenizer.fingerprint()
    with pytest.raises(TokenizerError, match=r"'k99' is no token of this task; did you mean k9\? "):
        tokenizer.encode("k0 k99")


def test_the_configuration_knows_every_task():
    assert tuple(sorted(TASKS)) == builtin.TASKS
    assert {builtin.TASK_TOKENIZER} == {build_task(name, {}).tokenizer.name for name in TASKS}
