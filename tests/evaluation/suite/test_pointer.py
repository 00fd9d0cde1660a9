"""The pointer finds what a text offers: planted repeats, and nothing in random text."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from megatron.evaluation.suite.measure import Sample, distinct_documents
from megatron.evaluation.suite.pointer import ORDERS, gains, pointer, predictions

WINDOW, TOKENS = 32, 1024
RNG = np.random.default_rng(0)


def by_loops(tokens, t, order, answers):
    """Return the share of the answers after the last `order` tokens that are the next token."""
    if t < order - 1:
        return -1.0
    last = tokens[t + 1 - order : t + 1]
    ends = [a - 1 for a in answers if a >= order and a - 1 < t]
    follow = [tokens[e + 1] for e in ends if (tokens[e + 1 - order : e + 1] == last).all()]
    return float(np.mean(follow == tokens[t + 1])) if follow else -1.0


@settings(max_examples=15, deadline=None)
@given(arrays(np.int64, (2, 14), elements=st.integers(0, 2)), st.integers(1, 12))
def test_the_predictions_are_those_of_plain_loops(sequences_nT, window):
    found = predictions(sequences_nT, window)
    for row, tokens in enumerate(sequences_nT):
        for t in range(len(tokens) - 1):
            held = range(max(0, t + 1 - window), t + 1)  # what the window holds
            ways = {"all": range(t + 1), "near": held, "far": range(held.start)}
            for name, answers in ways.items():
                expected = [by_loops(tokens, t, order, answers) for order in ORDERS]
                assert found[name][row, t] == pytest.approx(expected), (name, row, t)


def planted(distance: int, rows: int = 20) -> np.ndarray:
    """Return rows of different tokens, in which the last 64 tokens stood `distance` before."""
    rows_nT = np.stack([RNG.permutation(TOKENS)[:193] for _ in range(rows)])
    for place in range(193 - 64, 193):
        rows_nT[:, place] = rows_nT[:, place - distance]
    return rows_nT


@pytest.mark.parametrize(("distance", "far"), [(128, True), (24, False)])
def test_planted_repeats_are_worth_what_a_count_says(distance, far):
    losses = np.full((20, 192), math.log(TOKENS))
    sample = Sample(planted(distance), np.arange(20), WINDOW, (192,), 1)
    found = pointer(sample, losses, losses)
    rows = {row.at["matches"].split()[0]: row for row in found.rows}
    # Two tokens must be repeated before the pointer knows the third: 62 of 160 scored targets.
    worth = math.log(TOKENS) * 62 / 160
    expected = {"beyond": worth * far, "within": worth * (not far)}
    for name, row in rows.items():
        assert row.estimate.value == pytest.approx(expected[name], rel=0.02, abs=1e-12)
        assert row.also["left"] == row.estimate.value
    # Repeats with the period 24 also stand 48 tokens before, 24 tokens later than the first time.
    alone = math.log(TOKENS) * (62 if far else 38) / 160
    assert rows["beyond"].also["alone"] == pytest.approx(alone, rel=0.02)
    assert ("0% [0%, 0%] of it" in found.says) == far


def test_a_model_that_takes_half_of_the_offer_is_told():
    sample = Sample(planted(128), np.arange(20), WINDOW, (192,), 1)
    twin = np.full((20, 192), math.log(TOKENS))
    full = twin.copy()
    full[:, -62::2] = 0.0  # every second token that is offered
    found = pointer(sample, full, twin)
    far = found.rows[0]
    assert far.also["taken"] == pytest.approx(math.log(TOKENS) * 31 / 160)
    assert far.also["share"] == pytest.approx(0.5, abs=0.01)
    assert far.also["left"] == pytest.approx(math.log(TOKENS) * 31 / 160, rel=0.2)
    assert far.also["share_low"] <= far.also["share"] <= far.also["share_high"]
    assert found.says.startswith("Beyond 32 tokens, the text offers a pointer 2.6")


def test_random_text_offers_nothing():
    rows_nT = RNG.integers(32, size=(24, 257))
    losses = np.full((24, 256), math.log(32))
    sample = Sample(rows_nT, np.arange(24), WINDOW, (256,), 1)
    for row in pointer(sample, losses, losses).rows:
        assert row.estimate.low <= 0 and abs(row.estimate.value) < 0.005
        assert "share" not in row.also


def test_a_copied_document_teaches_nothing():
    first, *others = RNG.integers(TOKENS, size=(3, 1, 193))
    first[:, 129:] = first[:, 1:65]
    # The last document starts 40 tokens later than the first.
    later = np.concatenate((first[:, 40:], RNG.integers(TOKENS, size=(1, 40))), 1)
    rows_nT = np.concatenate((first, *others, first, *others, later))
    groups = distinct_documents(rows_nT, np.arange(7))
    assert groups.tolist() == [0, 1, 2, 0, 1, 2, 0]
    losses, found = np.full((7, 192), math.log(TOKENS)), predictions(rows_nT, WINDOW)["all"]
    assert gains(found, losses, np.arange(7))[0].mean() > 1.0  # it knows its copies
    assert (gains(found, losses, groups)[[0, 3]] == 0).all()


def test_sequences_of_one_document_stay_together():
    rows_nT = RNG.integers(TOKENS, size=(6, 101))
    rows_nT[4] = rows_nT[1]
    documents = np.array([7, 7, 8, 8, 9, 9])
    assert distinct_documents(rows_nT, documents).tolist() == [0, 0, 1, 1, 0, 0]
    shared = rows_nT.copy()
    shared[:, :45] = rows_nT[0, :45]  # a licence at the top makes no copies
    assert len(set(distinct_documents(shared, np.arange(6)))) == 6 - 1


def test_losses_too_large_for_a_float_stay_finite():
    found = predictions(planted(128, 2), WINDOW)["all"]
    assert np.isfinite(gains(found, np.full((2, 192), 2000.0), np.arange(2))).all()


def test_text_no_longer_than_the_training_length_is_not_measured():
    sample = Sample(planted(128, 2), np.arange(2), 192, (192,), 1)
    assert pointer(sample, np.zeros((2, 192)), np.zeros((2, 192))).rows == []
