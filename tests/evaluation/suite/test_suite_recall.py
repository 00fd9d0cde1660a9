"""Recall on losses that are known: where needles stand, what controls change, what gains count."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron.evaluation.suite import recall
from megatron.evaluation.suite.measure import Sample
from tests.evaluation.suite.test_suite_by_hand import subject


def answers_seen(draws=None):
    """Return texts for `copying`, and a model with loss 1 for tokens seen before, otherwise 3."""
    read = []

    def losses(inputs, targets):
        text = torch.cat([inputs, targets[:, -1:]], 1)
        read.append(text)
        seen = [
            [1.0 if x in row[: t + 1] else 3.0 for t, x in enumerate(row[1:])]
            for row in text.tolist()
        ]
        return torch.tensor(seen)

    return read, subject(losses)


def test_a_needle_is_hidden_at_its_depth_and_asked_for_at_the_end():
    read, model = answers_seen()
    ids = np.arange(6 * 129).reshape(6, 129) + 10**6  # nothing occurs twice
    sample = Sample(ids, np.arange(6), 32, (128,), 4 * 128 * 6)
    found = recall.copying(model, sample)
    assert [row.at for row in found.rows] == [
        {"length": 128, "depth": depth, "control": "order"} for depth in (0.0, 0.5, 0.9)
    ]
    room = 129 - 24 - 24
    for row, depth, texts in zip(
        found.rows, (0.0, 0.5, 0.9), zip(read[::2], read[1::2], strict=True), strict=True
    ):
        present, control = (each.numpy() for each in texts)
        split = round(depth * room)
        assert len(present) == 6
        for own, text, other in zip(ids, present, control, strict=True):
            cue, answer = text[split : split + 8], text[split + 8 : split + 24]
            assert text.tolist() == [*own[:split], *cue, *answer, *own[split:room], *cue, *answer]
            assert other[split : split + 8].tolist() == cue.tolist()
            assert other[split + 8 : split + 24].tolist() == answer.tolist()[::-1]
            assert (np.delete(other, slice(split + 8, split + 24))
                    == np.delete(text, slice(split + 8, split + 24))).all()  # fmt: skip
        assert row.also["probability"] == pytest.approx(math.exp(-1))
        assert row.estimate.value == 0  # a model that knows which tokens occurred gains nothing
    assert "no answer is surely predicted better" in found.says and found.answer == []


def test_needles_that_fill_half_the_text_are_left_out():
    """Cue and answer of 24 tokens stand twice: 2 x (24 + 24) = 96."""
    model = subject(lambda inputs, targets: torch.ones(targets.shape))
    for length, cells in ((95, 0), (96, 3)):
        ids = np.arange(6 * 129).reshape(6, 129)
        sample = Sample(ids, np.arange(6), 32, (length,), 400)
        found = recall.copying(model, sample)
        assert len(found.rows) == cells
        told = "no answer is surely predicted better because it occurs in the text."
        if not cells:
            told = "not measured. No text has room, or no answer differs from its reverse."
        assert found.says == f"Copy of random tokens: {told}"


def follows_before(inputs, targets):
    """Stand for a model: the loss is 1 if the target has followed the same token before, else 3."""
    losses = []
    for row in torch.cat([inputs, targets[:, -1:]], 1).tolist():
        pairs = list(zip(row, row[1:], strict=False))
        losses.append([1.0 if pair in pairs[:t] else 3.0 for t, pair in enumerate(pairs)])
    return torch.tensor(losses)


def test_repeated_tokens_gain_by_their_order():
    ids = np.arange(6 * 129).reshape(6, 129)
    _, counting = answers_seen()
    for model, gain in ((subject(follows_before), 2.0), (counting, 0.0)):
        found = recall.induction(model, Sample(ids, np.arange(6), 32, (64,), 4 * 64))
        assert [row.at["distance"] for row in found.rows] == [8, 16, 32]
        assert [row.estimate.documents for row in found.rows] == [24, 24, 24]
        for row in found.rows:
            assert row.estimate.value == pytest.approx(gain, abs=0.1)
        assert found.answer == (32 if gain else 0)
        best = max(found.rows, key=lambda row: row.estimate.value)
        assert found.says == (
            "Repeated random tokens are predicted better up to a distance of 32, most at "
            f"{best.at['distance']}: by {best.estimate.value:.3f} nats."
            if gain
            else "Random tokens are not predicted better when they occur for the second time."
        )
    tokens = {4 * 64: 24, 4 * 8 * 30: 30, 10**6: 64}
    for given, count in tokens.items():
        sample = Sample(ids, np.arange(6), 32, (64,), given)
        assert recall.induction(model, sample).rows[0].estimate.documents == count
