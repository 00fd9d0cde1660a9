"""Test the choice of tokens: distributions against a plain reference, and repeatability."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megatron.engine.errors import DivergedError
from megatron.generation.sampling import Sampling, penalised, probabilities, sample
from megatron.parallel.rng import named_generator

LOGITS = [1.5, -0.2, 3.0, 3.0, 0.7, -4.0, 2.9, -math.inf]


def reference(logits, temperature, top_k, top_p):
    """Return the distribution as a list: sort, keep `top_k`, then keep until `top_p` is reached."""
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda v: (-weights[v], v))[: top_k or len(logits)]
    total, kept, reached = sum(weights[v] for v in order), [], 0.0
    for v in order:
        if not kept or reached < top_p * total:
            kept.append(v)
            reached += weights[v]
    total = sum(weights[v] for v in kept)
    return [weights[v] / total if v in kept else 0.0 for v in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 2, 3, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.0])
def test_the_distribution_is_that_of_the_reference(temperature, top_k, top_p):
    rows = [LOGITS, LOGITS[::-1]]
    if (temperature, top_k, top_p) == (1.0, None, 1.0):
        rows.append([0.0] * len(LOGITS))
    found = probabilities(torch.tensor(rows), Sampling(temperature, top_k, top_p))
    expected = [reference(row, temperature, top_k, top_p) for row in rows]
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=0, atol=1e-7)


def test_tokens_are_drawn_with_these_probabilities():
    how, count = Sampling(1.3, 4, 0.95), 8_000
    drawn = sample(torch.tensor([LOGITS] * count), how, [torch.Generator().manual_seed(1)] * count)
    expected = torch.tensor(reference(LOGITS, 1.3, 4, 0.95))
    found = drawn.bincount(minlength=len(LOGITS)) / count
    assert (found - expected).abs().max() < 0.025 and (found[expected == 0] == 0).all()


def test_temperature_zero_takes_the_first_of_the_most_likely_tokens():
    logits = torch.tensor([LOGITS, LOGITS[::-1]])
    assert sample(logits, Sampling(0.0, top_k=1, top_p=0.1), ()).tolist() == [2, 4]


def test_a_text_draws_the_same_in_every_batch():
    logits, how = torch.randn(6, 50), Sampling()

    def drawn(rows):
        generators = [named_generator(3, str(row)) for row in rows]
        return [sample(logits[rows], how, generators).tolist() for _ in range(5)]

    together, pair = drawn(range(6)), drawn([4, 1])
    assert [[step[4], step[1]] for step in together] == pair
    assert together == drawn(range(6)) and together[0] != together[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(bad, temperature):
    logits = torch.tensor([[0.0, 1.0], [bad, 0.0]], dtype=torch.float16)
    with pytest.raises(DivergedError, match="not finite; -o precision=fp32"):
        sample(logits, Sampling(temperature), [torch.Generator()] * 2)


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.7])
@pytest.mark.parametrize(("min_p", "top_k", "top_p"), [(0.2, None, 1.0), (0.05, 20, 0.8)])
def test_penalty_and_min_p_are_those_of_transformers(penalty, min_p, top_k, top_p):
    logits = 2 * torch.randn(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    texts = torch.randint(40, (5, 30), generator=torch.Generator().manual_seed(5))
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    theirs.append(TemperatureLogitsWarper(1.5))
    if top_k:
        theirs.extend([TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)])
    theirs.append(MinPLogitsWarper(min_p))
    wanted = theirs(texts, logits.clone()).softmax(-1)
    how = Sampling(1.5, top_k, top_p, min_p, penalty)
    found = probabilities(penalised(logits, texts.tolist(), penalty), how)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)
    assert 1 < (wanted[0] > 0).sum() < 40
    greedy = Sampling(0.0, repetition_penalty=penalty)
    best = RepetitionPenaltyLogitsProcessor(penalty)(texts, logits.clone()).argmax(-1)
    assert torch.equal(sample(logits, greedy, (), texts.tolist()), best)
