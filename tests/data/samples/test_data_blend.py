"""Test blending: GPT-NeoX's rule, and the data set that uses it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.errors import DataExhausted
from megatron.data.samples import blend
from megatron.data.samples.blend import (
    BlendedDataset,
    blend_choices,
    normalized,
    weights_by_documents,
)
from megatron.data.samples.dataset import TokenDataset


def published_choices(weights, size: int) -> list[int]:
    """Choose corpora by GPT-NeoX's rule in a plain loop, with Python's floats (C's doubles)."""
    counts, chosen = [0] * len(weights), []
    for step in range(size):
        at = max(float(step), 1.0)
        errors = [float(w) * at - float(count) for w, count in zip(weights, counts, strict=True)]
        best = errors.index(max(errors))
        counts[best] += 1
        chosen.append(best)
    return chosen


WEIGHTS = st.lists(st.floats(0.001, 100), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(0, 300), st.integers(2, 40))
def test_choices_are_the_published_ones(weights, size, lanes):
    """Segments are made short, so that even short orders have several."""
    shares = np.array(normalized(weights))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "_LANES", lanes)
        patch.setattr(blend, "_WARM_UP", 1)
        found = blend_choices(shares, size)
    assert found.dtype == np.uint8 and found.tolist() == published_choices(shares, size)


@pytest.mark.parametrize("weights", [[0.7, 0.3], [1, 1, 1], [0.9, 0.09, 0.009, 0.001], [2, 0, 1]])
def test_a_long_order(weights):
    shares = np.array(normalized(weights))
    found = blend_choices(shares, 2_200_000)
    assert found[:100_000].tolist() == published_choices(shares, 100_000)
    counts = np.bincount(found, minlength=len(weights))
    np.testing.assert_allclose(counts, shares * len(found), atol=len(weights))
    # The last thousand steps, from the counts of all choices before them.
    begin = len(found) - 1000
    state = np.bincount(found[:begin], minlength=len(weights))
    for step in range(begin, len(found)):
        best = int(np.argmax(shares * float(step) - state))
        assert found[step] == best
        state[best] += 1


def test_weights_by_documents():
    assert weights_by_documents([7], 0.3) == [1.0]
    assert weights_by_documents([0, 0], 0.3) == [1.0, 1.0]  # no sample is drawn from such a split
    counts, alpha = [100, 300, 600], 0.3
    shares = [0.1, 0.3, 0.6]
    powers = [share**alpha for share in shares]
    wanted = [q / sum(powers) * (1 - p) for q, p in zip(powers, shares, strict=True)]
    found = weights_by_documents(counts, alpha)
    np.testing.assert_allclose(found, np.array(wanted) / sum(wanted), rtol=1e-14)
    raised = np.array(found) / shares
    assert raised[0] > raised[1] > raised[2]  # the smaller a corpus, the more


@pytest.fixture
def corpora(make_shards):
    rng = np.random.default_rng(3)
    return [
        make_shards([rng.integers(0, 500, n) for n in rng.integers(1, 40, 30)], name=f"c{i}")
        for i in range(3)
    ]


def blended(corpora, weights, num_samples, extend_to=None):
    def build(d, samples, extend):
        shards = corpora[d]
        return TokenDataset(shards, (0, len(shards)), samples, 8, 5, f"t{d}", extend_to=extend)

    return BlendedDataset(build, weights, num_samples, "train", extend_to)


def test_samples_come_from_the_chosen_corpora_in_their_orders(corpora):
    weights, n = [5, 3, 2], 60
    data = blended(corpora, weights, n)
    # GPT-NeoX indexes each corpus for ceil(1.005 N w) samples.
    alone = [
        TokenDataset(shards, (0, len(shards)), math.ceil(n * w / 10 * 1.005), 8, 5, "x")
        for shards, w in zip(corpora, weights, strict=True)
    ]
    taken = [0, 0, 0]
    rows = data.batch(np.arange(n))
    for i, d in enumerate(published_choices(normalized(weights), n)):
        np.testing.assert_array_equal(rows[i], alone[d].batch([taken[d]])[0])
        taken[d] += 1
    assert len(data) == n and data.published_length == sum(a.published_length for a in alone)
    np.testing.assert_array_equal(data.batch([7, 3, 7]), rows[[7, 3, 7]])
    with pytest.raises(DataExhausted, match="train: sample 60 of 60"):
        data.batch([n])


def test_extending_keeps_what_came_before(corpora):
    data, longer = (blended(corpora, [1, 2, 4], 40, extend) for extend in (None, 500))
    np.testing.assert_array_equal(longer.batch(np.arange(40)), data.batch(np.arange(40)))
    assert len(longer) == 500 and longer.batch(np.arange(500)).shape == (500, 9)


def test_weights_of_corpora_without_documents():
    assert weights_by_documents([7, 0], 0.3) == [1, 0]
    assert weights_by_documents([0, 7, 0], 2000) == [0, 1, 0]
    assert weights_by_documents([3, 3, 0], 0.3) == pytest.approx([0.5, 0.5, 0])
