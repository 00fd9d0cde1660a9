"""Test RULER's questions with models that solve them, or that only know where words stood."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from megatron.data.tokenizers.build import build_tokenizer
from megatron.evaluation.suite import recall
from megatron.evaluation.suite.measure import Sample, Subject
from megatron.evaluation.suite.ruler import TASKS, WORDS, ruler
from megatron.parallel.groups import build_groups
from tests.evaluation.suite.planted import Ascii
from tests.helpers.pipelines import write_pipeline

GROUPS = build_groups(torch.device("cpu"))
TEXT = np.frombuffer(b"the cat sat on the mat, and there it sat. " * 13, np.uint8).astype(np.int64)
SAMPLE = Sample(
    np.stack([TEXT[i : i + 513] for i in range(24)]), np.arange(24), 64, (64, 256, 512), 256
)


def solve(text: str) -> str:
    """Return the answer to the question that ends `text`, from the statements, without the end."""
    if found := re.search(r"\n(\w+) ->[ \d]*$", text):
        value = found[1]
        while not value.isdigit():
            if not (found := re.search(rf"\n{value} = (\w+)\n", text)):
                return ""
            value = found[1]
        return f" {value}"
    if "\n- " in text:
        words = re.findall(r"\n- (\w+)\n", text)
        return "".join(f"\n- {w}" for w in dict.fromkeys(words) if words.count(w) >= 4)
    key = re.findall(r"\n(\w+) =[ \d]*$", text)[-1]
    return "".join(f"\n{key} = {value}" for value in re.findall(rf"\n{key} = (\d+)\n", text))


@pytest.mark.parametrize("task", TASKS)
def test_the_answers_are_those_of_a_solver(task):
    rng = np.random.default_rng(5)
    for _ in range(10):
        puzzle = TASKS[task](Ascii(), rng)
        answer, cue = bytes(puzzle.answer.tolist()), bytes(puzzle.cue.tolist())
        for name, statements in ({"": puzzle.statements} | puzzle.controls).items():
            hidden = b"some text".join(bytes(part.tolist()) for part in statements)
            asked = (cue + answer).decode()
            if task == "words":
                kept = re.findall(r"\n- (\w+)\n", hidden.decode())
                common = {word for word in kept if kept.count(word) == 4}
                assert (common == set(re.findall(r"- (\w+)", asked))) is (name == "")
                assert len(kept) == 10 and set(kept) <= set(WORDS)
            elif task == "tracking":
                assert (solve(hidden.decode() + cue.decode()) == answer.decode()) is (name == "")
            else:
                solved = solve(hidden.decode() + cue.decode())
                assert (set(solved.split("\n")) == set(asked.split("\n"))) is (name == "")
        counts = {name: np.sort(np.concatenate(each)) for name, each in puzzle.controls.items()}
        if task != "words":
            own = np.sort(np.concatenate(puzzle.statements))
            assert all((own == other).all() for other in counts.values())


def test_texts_have_their_length_and_statements_in_the_first_half():
    read = []

    def losses(inputs, targets):
        read.append(torch.cat([inputs, targets[:, -1:]], 1))
        return torch.ones(targets.shape)

    found = ruler(Subject(torch.nn.Linear(1, 1), GROUPS, 10**9, loss_fn=losses), SAMPLE, Ascii())
    assert {(row.at["length"], row.at["task"]) for row in found.rows} == {
        (length, task) for length in (256, 512) for task in TASKS
    }
    assert found.says == "RULER's questions: answers are found for none."
    assert found.answer == dict.fromkeys(TASKS, 0)
    assert {texts.shape for texts in read} == {(24, 257), (24, 513)}
    for texts in read:
        for text in texts:
            whole = bytes(text.tolist()).decode()
            ends = [match.end() for match in re.finditer(r"\n(\w+ = \w+|- \w+)\n", whole[:-40])]
            statements = sum(len(each) for each in re.findall(r"\n(?:\w+ = \w+|- \w+)\n", whole))
            assert ends and max(ends) <= (len(whole) + statements) / 2 + 2


def test_a_model_that_finds_the_answers_is_seen():
    """Its loss is 0.1 for a token of the last 40 that the solver would write, otherwise 3."""

    def losses(inputs, targets):
        whole = torch.cat([inputs, targets[:, -1:]], 1)
        out = torch.full(targets.shape, 3.0)
        for row, text in enumerate(bytes(line.tolist()).decode() for line in whole):
            asked = re.search(r"\n(\w+) -> \d+$", text)
            if (
                asked
                and solve(text[: asked.start()] + f"\n{asked[1]} ->") == text[asked.end() - 6 :]
            ):
                out[row, -6:] = 0.1
        return out

    found = ruler(Subject(torch.nn.Linear(1, 1), GROUPS, 4096, loss_fn=losses), SAMPLE, Ascii())
    assert found.answer == {"keys": 0, "values": 0, "tracking": 512, "words": 0}
    assert found.says == "RULER's questions: answers are found for tracking up to 512 tokens."


def test_short_texts_are_not_asked():
    short = Sample(SAMPLE.sequences_nT[:, :129], SAMPLE.documents, 64, (64, 128), 256)
    found = ruler(Subject(torch.nn.Linear(1, 1), GROUPS, 4096), short, Ascii())
    assert found.rows == [] and "no text has 256 tokens" in found.says


@pytest.mark.parametrize("pipeline", ["llama2", "gpt2"])
def test_texts_are_encoded_whole(pipeline, tmp_path):
    tokenizer = build_tokenizer("HFTokenizer", write_pipeline(pipeline, tmp_path))
    texts = ("\nThe pass key is", " 12345", ". Remember it.\n")
    parts = recall.pieces(tokenizer, *texts)
    assert np.concatenate(parts).tolist() == tokenizer.encode("".join(texts)).tolist()
    assert len(parts) == 3 and all(len(part) for part in parts)
    whole = tokenizer.decode(np.concatenate(parts[:2]))
    assert whole.strip().endswith("is 12345")
