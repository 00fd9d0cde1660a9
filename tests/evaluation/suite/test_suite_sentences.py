"""Test that the suite's sentences have enough digits, or say that nothing differs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from megatron.evaluation.suite import perplexity, recall
from megatron.evaluation.suite.intervals import Estimate
from megatron.evaluation.suite.measure import Sample, Subject
from megatron.parallel.groups import build_groups

SEQUENCES_NT = np.random.default_rng(0).integers(0, 32, (12, 257))
SAMPLE = Sample(SEQUENCES_NT, np.arange(12), 32, (32, 256), 4096)


@pytest.fixture
def subject_with():
    """Return subject_with(losses): a model whose losses are all equal, in each call the next."""

    def subject(*losses: float) -> Subject:
        turn = itertools.cycle(losses)
        groups = build_groups(torch.device("cpu"))
        return Subject(
            torch.nn.Linear(1, 1),
            groups,
            10**9,  # one batch for each call
            loss_fn=lambda inputs, targets: torch.full(inputs.shape, next(turn)),
        )

    return subject


def test_small_probabilities_are_told_apart(subject_with):
    says = recall.copying(subject_with(10.5, 10.8), SAMPLE).says  # with the answer, and without
    assert "(the probability of a token goes from 0.0000204 to 0.0000275)" in says


def test_losses_by_position_are_told_apart_or_the_same():
    full_nT = np.full((12, 256), 3.5)
    says = perplexity.by_position(SAMPLE, full_nT).says
    assert says == "The loss is 3.50 nats after one token and the same after 128 or more."
    full_nT[:, -1] += 0.01
    says = perplexity.by_position(SAMPLE, full_nT).says
    assert says == "The loss is 3.5000 nats after one token and 3.5001 after 128 or more."


def test_a_perplexity_that_does_not_depend_on_the_length(subject_with):
    full_nT = np.full((12, 256), 2.0)
    found = perplexity.by_length(subject_with(2.0), SAMPLE, full_nT, np.ones_like)
    assert found.says == "Perplexity is 7.39 at every length."


def test_small_differences_have_digits():
    found = Estimate(2e-5, 1e-5, 3e-5, 9)
    assert str(found) == "0.000020 [0.000010, 0.000030]"
    assert str(Estimate(0.06614, 0.04862, 0.0856, 9)) == "0.0661 [0.0486, 0.0856]"
