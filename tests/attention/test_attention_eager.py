"""Test eager attention, the specification, against its formula written as loops in float64."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.attention import attend
from megatron.positional import load


def by_hand(q, k, v, theta, scale: float, offset: int) -> torch.Tensor:
    """Compute attention for one sequence with loops; theta is that of kerple_power_add_mul."""
    out = torch.zeros_like(q)
    for h, (p, a, p2, a2) in enumerate(theta.tolist()):
        for row in range(q.shape[1]):
            i = offset + row
            scores = []
            for j in range(i + 1):
                d = i - j
                product = scale * math.fsum((q[h, row] * k[h, j]).tolist())
                scores.append(product * math.exp(-a2 * d**p2) - a * d**p)
            exps = [math.exp(s - max(scores)) for s in scores]
            for j, e in enumerate(exps):
                out[h, row] += e / math.fsum(exps) * v[h, j]
    return out


@pytest.mark.parametrize("queries,offset,later", [(7, 0, 0), (1, 0, 0), (3, 4, 0), (2, 1, 5)])
def test_eager_is_the_formula(queries, offset, later):
    generator = torch.Generator().manual_seed(queries)
    keys = offset + queries + later
    q, k, v = (torch.randn(2, 3, n, 4, generator=generator).double() for n in (queries, keys, keys))
    theta = torch.rand(3, 4, generator=generator).double() + 0.1
    pos = load("kerple_power_add_mul")
    got = attend(q, k, v, pos, theta, scale=0.7, query_offset=offset, backend="eager")
    for b in range(2):
        expected = by_hand(q[b], k[b], v[b], theta, 0.7, offset)
        torch.testing.assert_close(got[b], expected, rtol=0, atol=1e-13)


def test_half_precision_is_rounded_once_at_the_end():
    """The result for bf16 inputs is the fp32 result for the same numbers, rounded to bf16."""
    q, k, v = (torch.randn(1, 2, 600, 8).bfloat16() for _ in range(3))
    pos = load("kerple_log")
    theta = pos.initial_theta(2)
    got = attend(q, k, v, pos, theta, scale=0.4, backend="eager")
    exact = attend(q.float(), k.float(), v.float(), pos, theta, scale=0.4, backend="eager")
    assert got.dtype == torch.bfloat16 and torch.equal(got, exact.bfloat16())


def test_dropout_keeps_the_mean_and_follows_the_seed():
    q, k = torch.randn(2, 2, 64, 8), torch.randn(2, 2, 64, 8)
    v = torch.eye(64).expand(2, 2, -1, -1)
    q, k = torch.nn.functional.pad(q, (0, 56)), torch.nn.functional.pad(k, (0, 56))
    pos = load("none")
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(attend(q, k, v, pos, scale=0.1, dropout_p=0.25, backend="eager"))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    probs = attend(q, k, v, pos, scale=0.1, backend="eager")
    kept = outs[0] != 0
    torch.testing.assert_close(outs[0][kept], probs[kept] / 0.75)
    assert abs(kept[probs > 0].float().mean().item() - 0.75) < 0.02
