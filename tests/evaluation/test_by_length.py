"""Test perplexity by length against a direct computation."""

import math
import tracemalloc

import numpy as np
import pytest
import torch

from megatron.evaluation.by_length import Measurement
from megatron.evaluation.losses import losses_of_sequences, scores_of_sequences
from megatron.evaluation.perplexity_statistics import summarise
from megatron.parallel.groups import build_groups

GROUPS = build_groups(torch.device("cpu"))


def loss_of(inputs, targets):
    """Return losses of a fake model. They depend on the target and on the length of the context."""
    seen = torch.arange(1, inputs.shape[1] + 1).expand_as(inputs)
    return targets.float() / 10 + 1.0 / seen


def sequences(n, length):
    return np.random.default_rng(0).integers(0, 9, (n, length + 1))


@pytest.mark.parametrize("batch_tokens", [1, 7, 16, 10**6])
def test_every_sequence_is_scored_once_whatever_the_batch(batch_tokens):
    rows = sequences(7, 4)
    losses = losses_of_sequences(loss_of, rows, GROUPS, batch_tokens=batch_tokens)
    expected = rows[:, 1:].mean(1) / 10 + np.mean([1, 1 / 2, 1 / 3, 1 / 4])
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("batch_tokens", "passes"), [(3, [4] * 5), (8, [8, 8, 4]), (11, [8, 8, 4]), (12, [12, 8])]
)
def test_a_pass_has_as_many_sequences_as_fit(batch_tokens, passes):
    ticks: list[int] = []
    scores_of_sequences(
        loss_of, sequences(5, 4), GROUPS, batch_tokens=batch_tokens, width=1, tick=ticks.append,
        score=lambda losses, inputs: losses[:, :1],
    )  # fmt: skip
    assert ticks == passes


def test_last_only_scores_the_last_target():
    rows = sequences(5, 4)
    losses = losses_of_sequences(loss_of, rows, GROUPS, batch_tokens=8, last_only=True)
    np.testing.assert_allclose(losses, rows[:, -1] / 10 + 1 / 4, rtol=1e-6)


def test_targets_after_an_end_of_document_are_not_scored():
    rows = sequences(7, 4)
    counted = rows[:, :-1] != 0
    assert not counted.all() and len(set(counted.sum(1))) > 1
    losses = loss_of(torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])).numpy()
    measurement = Measurement(loss_of, lambda *given: rows, np.ones_like, 8, GROUPS, 0)
    result = measurement.at_length(4)
    assert result.loss == pytest.approx(losses[counted].mean(), rel=1e-6)
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2), rel=1e-6)
    last = measurement.with_context(4, length=4, targets=1000)
    assert last.loss == pytest.approx(losses[counted[:, -1], -1].mean(), rel=1e-6)


def test_each_sequence_has_the_weight_of_its_scored_targets():
    """Five of eight targets are scored, so the sums of losses are divided by 4 x 5/8 = 2.5."""
    rows = np.array([[0, 5, 6, 0, 7], [1, 2, 0, 3, 4]])  # 0 ends a document

    def loss_is_the_target(inputs, targets):
        return targets.float()

    found = losses_of_sequences(loss_is_the_target, rows, GROUPS, batch_tokens=4, uncounted_after=0)
    assert found.tolist() == [(6 + 0) / 2.5, (2 + 0 + 4) / 2.5]
    assert found.mean() == pytest.approx((6 + 0 + 2 + 0 + 4) / 5)
    nothing = losses_of_sequences(
        loss_is_the_target, np.zeros((2, 3), int), GROUPS, batch_tokens=4, uncounted_after=0
    )
    assert nothing.tolist() == [0.0, 0.0]


def test_summary():
    losses = np.array([1.0, 2.0, 3.0, 4.0])
    result = summarise(10, losses, np.full((4, 10), 2))
    assert result.loss == 2.5 and result.perplexity == pytest.approx(math.exp(2.5))
    assert result.stderr == pytest.approx(np.std(losses, ddof=1) / 2)
    assert result.bits_per_byte == pytest.approx(2.5 / math.log(2) / 2)
    assert (result.length, result.sequences) == (10, 4)


def test_lengths_keep_their_order_and_each_prints_a_line():
    printed = []
    measurement = Measurement(
        loss_of, lambda length, _: sequences(32 // length, length), np.ones_like, 16, GROUPS
    )
    results = measurement.at_lengths([4, 8], printed.append)
    assert [(r.length, r.sequences) for r in results] == [(4, 8), (8, 4)]
    assert len(printed) == 2 and "length 4: perplexity" in printed[0]


def test_the_limited_context_sees_exactly_that_many_tokens():
    rows = np.arange(40).reshape(2, 20)
    seen = []

    def spy(inputs, targets):
        seen.append((inputs.clone(), targets.clone()))
        return torch.zeros(inputs.shape)

    measurement = Measurement(spy, lambda *given: rows, np.ones_like, 30, GROUPS)
    result = measurement.with_context(3, length=19, targets=1000)
    inputs = torch.cat([i for i, _ in seen])
    assert inputs.shape == (2 * 17, 3) and result.length == 3 and result.sequences == 34
    assert torch.equal(inputs[0], torch.tensor([0, 1, 2]))
    assert torch.equal(torch.cat([t for _, t in seen])[0], torch.tensor([1, 2, 3]))
    fewer = measurement.with_context(3, length=19, targets=10)
    assert 10 <= fewer.sequences <= 17


def test_the_limited_context_needs_memory_for_the_scored_windows_alone():
    """All 57,344 windows of 513 ids would need 235 MB, and the text has 0.5 MB."""
    rows = np.arange(16 * 4097).reshape(16, 4097)
    zeros = Measurement(
        lambda inputs, targets: torch.zeros(inputs.shape),
        lambda *given: rows,
        np.ones_like,
        8192,
        GROUPS,
    )
    tracemalloc.start()
    assert zeros.with_context(512, length=4096, targets=128).sequences >= 128
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10e6
