"""Test what the suite says about models whose use of context is known, and its statistics."""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch
from scipy import stats

import evaluate as command
from megatron.attention import choose
from megatron.data.errors import DataError
from megatron.data.tokenizers.byte_level import ByteLevelTokenizer
from megatron.evaluation.suite import context, key_tokens
from megatron.evaluation.suite.all_measures import measure_all, measure_with_progress
from megatron.evaluation.suite.intervals import estimate, mean_of
from megatron.evaluation.suite.measure import Sample, Subject, read_sample
from megatron.evaluation.suite.verdict import verdict
from megatron.model import GPT, BlockShape, GPTShape, LayerAttention, Plan
from megatron.parallel.groups import build_groups
from megatron.positional import PerLayer, load
from tests.helpers.paths import FIXTURES
from tests.helpers.shards import write_documents
from tools import import_kerple

GROUPS = build_groups(torch.device("cpu"))
TOKENS = 32
LENGTHS = (32, 64, 128, 256)
WINDOW = 13
"""The largest distance of the limited model's keys. With the token before, 15 tokens are seen."""


class Letters(ByteLevelTokenizer):
    """A tokenizer with `TOKENS` ids."""

    def encode(self, text: str) -> np.ndarray:
        return super().encode(text) % TOKENS

    def token_bytes(self, ids: np.ndarray) -> np.ndarray:
        return np.ones_like(ids)


def gpt(positions: PerLayer, layers: int, window: int | None = None) -> GPT:
    parts = [positions.of_layer(index) for index in range(layers)]
    attend = choose("eager", positions, device_type="cpu", dtype=torch.float32, training=False)
    plan = Plan(
        GPTShape(layers, TOKENS, BlockShape(3 * TOKENS, 1, inner_size=8), 1024),
        positions,
        attend,
        seed=1,
        layers=tuple(LayerAttention(pos, attend, columns, window) for pos, columns in parts),
    )
    return GPT(plan).eval()


@torch.no_grad()
def induction_model(window: int | None = None) -> GPT:
    """Build two layers by hand that predict what followed the same token earlier.

    The hidden state has three parts: the token, the token before it, and the prediction. Layer 0
    copies the token at distance 1, which its rpe table prefers, into the second part. Layer 1
    finds keys whose second part is the query's first, and copies their first part into the third.
    """
    pos = PerLayer([load("rpe"), load("none")], own_theta=False)
    model = gpt(pos, 2, window)
    for name, weight in model.named_parameters():
        weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
    token, before, prediction = (slice(i * TOKENS, (i + 1) * TOKENS) for i in range(3))
    eye, width = torch.eye(TOKENS), 3 * TOKENS
    model.theta[:, 1] = 50.0
    model.embedding.word_embeddings.weight[:, token] = eye
    for index, target in enumerate((before, prediction)):
        attention = model.layers[index].attention
        query, key, value = attention.query_key_value.weight.view(3, width, width)
        value[target, token] = eye
        attention.dense.weight[target, target] = eye * math.sqrt((index + 1) / width)
        if index == 1:
            query[token, token] = 3 * eye
            key[token, before] = eye
    model.output.weight[:, prediction] = 0.6 * eye
    return model


def texts(count: int, size: int) -> list[np.ndarray]:
    """Return documents in which each token mostly has one successor, different in each one."""
    rng = np.random.default_rng(3)
    documents = []
    for _ in range(count):
        successor, document = rng.permutation(TOKENS), [0]
        while len(document) < size:
            follows = rng.random() < 0.75
            document.append(successor[document[-1]] if follows else rng.integers(TOKENS))
        documents.append(np.array(document))
    return documents


SAMPLE = Sample(np.stack(texts(12, 257)), np.arange(12), 32, LENGTHS, 4096)


def measured(model: GPT):
    subject = Subject(model, GROUPS, 4096)
    measures = measure_with_progress(subject, SAMPLE, Letters())
    return {measure.name: measure for measure in measures}, verdict(measures)


@pytest.fixture(scope="module")
def induction():
    return measured(induction_model())


def test_on_an_untrained_model_no_context_is_used():
    pos = PerLayer([load("kerple_log")] * 2, own_theta=False)
    found, lines = measured(gpt(pos, 2))
    assert lines[0].startswith("No use of context beyond the last token is seen")
    assert not any("harms" in line for line in lines)
    for name in ("induction", "copy", "passkey"):
        assert all(abs(row.estimate.value) < 0.05 for row in found[name].rows)
        assert "not predicted better" in found[name].says or "no answer" in found[name].says
    assert found["key_tokens"].says.startswith("No token with a loss below 2 nats gains over 2")


def test_on_a_model_limited_to_a_window_it_finds_the_window():
    found, lines = measured(induction_model(WINDOW))
    assert lines[0].startswith("The context is used up to 16 tokens: no longer context clearly")
    for name in ("far_swap", "windowed_twin"):
        assert all(abs(row.estimate.value) < 1e-6 for row in found[name].rows)
    gains = {row.at["distance"]: row.estimate.value for row in found["induction"].rows}
    assert gains[8] > 0.5 and all(abs(gains[d]) < 0.05 for d in (32, 64, 128))


def test_on_a_model_with_induction_it_finds_the_induction(induction):
    found, lines = induction
    assert found["receptive_field"].answer >= 64 and "harms" not in "".join(lines)
    rows = {row.at["distance"]: row for row in found["induction"].rows}
    assert rows[8].estimate.low > 1.0
    assert "predicted better" in found["induction"].says
    assert found["copy"].rows[0].estimate.low > 0.05 and "helps in" in found["copy"].says
    (swap,) = found["far_swap"].rows
    assert swap.estimate.low > 0 and "its content matters" in found["far_swap"].says
    assert found["windowed_twin"].answer == found["exact_context"].answer == "helps"
    keys = {row.at["model"]: row for row in found["key_tokens"].rows}
    assert keys["full"].estimate.high < keys["windowed twin"].estimate.low
    lengths = [row.estimate.value for row in found["by_length"].rows]
    assert lengths == sorted(lengths, reverse=True)


def test_every_result_has_an_interval_of_documents(induction):
    for measure in induction[0].values():
        assert measure.says.endswith(".") and measure.rows
        for row in measure.rows:
            found = row.estimate
            assert found.low <= found.value <= found.high and 1 < found.documents <= 64


def test_another_model_may_judge_which_tokens_are_key(induction):
    pos = PerLayer([load("none")], own_theta=False)
    subject, judge = (Subject(each, GROUPS, 4096) for each in (gpt(pos, 1), induction_model()))
    judge.name = "the other"
    measures = measure_with_progress(subject, SAMPLE, Letters(), judge)
    (found,) = (measure for measure in measures if measure.name == "key_tokens")
    (own,) = (row for row in induction[0]["key_tokens"].rows if row.at["model"] == "full")
    assert found.rows[0].also == own.also and "the judge is the other" in found.says
    assert found.rows[0].estimate.value == pytest.approx(TOKENS, rel=0.1)


def test_the_progress_bar_knows_the_number_of_tokens():
    read: list[int] = []
    fake = Subject(torch.nn.Linear(1, 1), GROUPS, 1000, read.append, seen_tokens)
    measure_all(fake, SAMPLE, Letters())
    first, counted = sum(read), []
    measure_all(Subject(fake.model, GROUPS, 77, counted.append, seen_tokens), SAMPLE, Letters())
    assert first == sum(counted) > SAMPLE.sequences_nT.size


def seen_tokens(inputs, targets):
    """Stand for a model: the loss is the number of tokens that are read."""
    return torch.arange(1.0, inputs.shape[1] + 1).expand_as(inputs)


def test_the_receptive_field_limits_the_context_as_it_says():
    subject = Subject(torch.nn.Linear(1, 1), GROUPS, 1000, loss_fn=seen_tokens)
    full_nT = subject.losses(SAMPLE.sequences_nT)
    rows = context.receptive_field(subject, SAMPLE, full_nT).rows
    assert [row.at["context"] for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for row in rows[:-1]:
        assert row.at["context"] <= row.estimate.value < 1.25 * row.at["context"]
    assert rows[-1].estimate.value == pytest.approx(256 - (SAMPLE.tail - 1) / 2)


def test_far_swap_replaces_far_text_only_and_by_that_of_other_documents():
    seen = []

    def spy(inputs, targets):
        seen.append(inputs)
        return torch.zeros(inputs.shape)

    owners = np.repeat(np.arange(4), 3)
    sample = Sample(SAMPLE.sequences_nT + 100 * owners[:, None], owners, 32, LENGTHS, 1)
    subject = Subject(torch.nn.Linear(1, 1), GROUPS, 1000, loss_fn=spy)
    context.far_swap(subject, sample, np.zeros((12, 256)))
    swapped_nT, own_nT = torch.cat(seen).numpy(), sample.sequences_nT[:, :-1]
    kept = 32 + sample.tail - 1  # the first scored token has 32 tokens of its document before it
    assert (swapped_nT[:, -kept:] == own_nT[:, -kept:]).all()
    assert (swapped_nT[:, :-kept] // 100 != owners[:, None]).all()


def test_key_tokens_gain_from_context_beyond_the_training_length():
    full_nT, twin_nT = np.full((2, 40), 1.0), np.full((2, 40), 1.5)
    twin_nT[0, 31:34] = 3.5  # the first of these has 32 tokens before it, and the window has 32
    full_nT[1, 35], twin_nT[1, 35] = 2.5, 9.0  # gains, but is not predicted well
    sample = Sample(np.zeros((2, 41), int), np.arange(2), 32, (40,), 1)
    gain_nT = key_tokens.judged_gain(full_nT, twin_nT)
    rows = key_tokens.key_tokens(sample, full_nT, twin_nT, gain_nT, "itself").rows
    assert rows[0].also["tokens"] == 2 and rows[0].also["share"] == 2 / 16
    assert [row.estimate.value for row in rows] == pytest.approx([math.e, math.exp(3.5)])


def test_an_estimate_is_a_ratio_over_documents_with_scipys_interval():
    totals, counts = np.array([2.0, 4.0, 9.0, 1.0]), np.array([1.0, 3.0, 3.0, 1.0])
    found = estimate(totals, counts, np.array([7, 7, 8, 9]))
    assert (found.value, found.documents) == (16 / 8, 3)
    values = np.random.default_rng(0).gamma(2.0, size=40)
    bootstrap = stats.bootstrap((values,), np.mean, n_resamples=2000, rng=np.random.default_rng(1))
    expected = bootstrap.confidence_interval
    found = estimate(values * 5, np.full(40, 5), np.arange(40))
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=0.02)
    middle, half = values.mean(), 1.96 * values.std() / math.sqrt(40)
    assert (found.low, found.high) == pytest.approx((middle - half, middle + half), rel=0.1)


def test_more_sequences_of_a_document_do_not_narrow_the_interval():
    losses_nT, documents = np.random.default_rng(0).random((10, 3)), np.arange(10)
    once = mean_of(losses_nT, documents)
    again = mean_of(np.tile(losses_nT, (4, 1)), np.tile(documents, 4))
    assert (again.low, again.high) == pytest.approx((once.low, once.high))


def test_estimates_of_equal_few_or_no_documents():
    assert mean_of(np.ones((5, 2)), np.arange(5)).low == 1.0
    alone = mean_of(np.ones((5, 2)), np.zeros(5))
    assert alone.value == 1.0 and math.isnan(alone.low)
    assert math.isnan(estimate(np.ones(2), np.zeros(2), np.arange(2)).value)


def test_only_documents_with_the_longest_length_are_read(tmp_path):
    sizes = [10, 300, 16, 17, 40, 18]
    whole = [np.append(np.arange(n - 1) + 1000 * i, 65000) for i, n in enumerate(sizes)]
    shards = write_documents(tmp_path / "t", whole)
    arguments = {"train_length": 8, "tokens": 100, "eod": 65000}
    sample = read_sample(shards, (0, 6), (8, 16), **arguments)
    owners = sample.sequences_nT // 1000
    assert (owners == sample.documents[:, None]).all() and set(sample.documents) == {1, 4, 5}
    assert (np.diff(sample.sequences_nT) == 1).all()
    assert len(set(sample.sequences_nT[sample.documents == 1].ravel())) == 6 * 17  # no overlap
    with pytest.raises(DataError, match="1 of 6 documents have the 201 tokens .* longest has 299"):
        read_sample(shards, (0, 6), (200,), **arguments)


def test_the_command_measures_an_imported_checkpoint(tmp_path, monkeypatch, capsys):
    released = FIXTURES / "parity" / "models" / "kerple_log"
    rng, run = np.random.default_rng(0), tmp_path / "run"
    write_documents(tmp_path / "text", (rng.integers(97, 123, 140) for _ in range(8)))
    monkeypatch.setattr(sys, "argv", ["import", str(released / "checkpoint"), str(run)])
    assert import_kerple.main() == 0
    keys = {"data_path": tmp_path / "text", "split": "0,8,0", "eval_suite_tokens": 256}
    options = [part for key, value in keys.items() for part in ("-o", f"{key}={value}")]
    arguments = [released / "config.yml", "--load", run, "--lengths", "32,64,128", *options]
    call = ["evaluate", *map(str, arguments), "--suite", "--judge", str(run)]
    monkeypatch.setattr(sys, "argv", call)
    with pytest.raises(SystemExit, match="1"):
        command.main()
    assert f"error: --judge {run}: {run} has no config.yml" in capsys.readouterr().err
    shutil.copy(released / "config.yml", run)
    assert command.main() == 0
    out, err = capsys.readouterr()
    assert "context" in out and "100%" in err
    assert f"the judge is {run / 'global_step50000'}" in out
    report = json.loads((run / "suite" / "report.json").read_text())
    page = (run / "suite" / "report.md").read_text()
    for name, measure in report["measures"].items():
        assert measure["says"] in page
        if name == "ruler":  # texts of 128 tokens are too short for its questions
            assert measure["rows"] == [] and not (run / "suite" / "ruler.csv").exists()
            continue
        with (run / "suite" / f"{name}.csv").open() as file:
            assert len(list(csv.DictReader(file))) == len(measure["rows"])
    pictures = {path.stem for path in (run / "suite").glob("*.png")}
    assert pictures >= {"by_length", "by_position", "receptive_field", "induction", "copy"}
    assert all(f"({name}.png)" in page for name in pictures)
    assert report["verdict"][0] in page and "8 different documents" in report["facts"]["sequences"]
