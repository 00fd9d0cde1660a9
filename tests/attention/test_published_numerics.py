"""Test `PublishedNumerics`, the strategy that rounds to 16 bits where the released code does.

These tests are about single operations. The parity tool compares whole models with bf16 results of
the released code.
"""

from __future__ import annotations

import math

import pytest
import torch

from megatron.attention import AttentionError, attend, choose
from megatron.model import BlockShape
from megatron.model.block_norm import BlockNorm
from megatron.numerics import WIDE, PublishedNumerics
from megatron.parallel.layers import ColumnLinear, RowLinear
from megatron.positional import load, names

BF16 = torch.bfloat16


def published(name, dtype=BF16):
    return load(name, numerics=PublishedNumerics(dtype))


@pytest.mark.parametrize("name", [n for n in names() if load(n).kind == "distance"])
def test_distances_beyond_256_are_rounded_only_on_request(name):
    theta = load(name).initial_theta(2, torch.Generator().manual_seed(0)).to(BF16)
    d = torch.arange(2048)
    for part in ("bias", "weight"):
        exact, rounded = (
            pos.bias_at(theta, d, d + 9) if part == "bias" else pos.weight(theta, d)
            for pos in (load(name), published(name))
        )
        if exact is None:
            assert rounded is None
            continue
        assert (exact.dtype, rounded.dtype) == (torch.float32, BF16)
        if name == "rpe":  # buckets come from whole numbers there as well
            assert torch.equal(rounded, exact.to(BF16))
            continue
        # 1,025 ... 1,027 are 1,024 in bf16
        assert torch.equal(rounded[:, 1025], rounded[:, 1024])
        if part == "bias" and name not in (
            "gaussian",
            "gaussian3",
            "sandwich",
            "fire",
            "bam",
        ):  # flat, waves
            assert (exact[:, 1026] < exact[:, 1024]).all()


def test_kerple_log_rounds_after_every_operation():
    theta, d = torch.tensor([[1.3, 0.7]]).to(BF16), torch.arange(512)
    p, a = theta[0]
    by_hand = -p * torch.log((1 + (a * d.to(BF16)).to(BF16)).to(BF16)).to(BF16)
    assert torch.equal(published("kerple_log").bias(theta, d)[0], by_hand)


def test_constants_are_rounded_to_what_was_stored():
    slopes = load("alibi").initial_theta(12)  # not all powers of two
    assert not torch.equal(published("alibi").numerics.constant(slopes), slopes)
    assert torch.equal(published("alibi").numerics.constant(slopes), slopes.to(BF16).float())
    assert torch.equal(load("alibi").numerics.constant(slopes), slopes)
    x = torch.ones(1, 1, 300, 8)  # fp32 activations, frequencies stored in bf16
    turned, _ = published("rotary").rotate(x, x)
    exact, _ = load("rotary").rotate(x, x)
    assert turned.dtype == torch.float32 and (turned - exact).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["rotary", "sinusoidal"])
def test_positions_are_rounded_too(name):
    if name == "rotary":
        x = torch.ones(1, 1, 600, 8).to(BF16)
        table = published(name).rotate(x, x)[0][0, 0]
    else:
        table = published(name).table(torch.arange(600), 8, BF16)
    assert table.dtype == BF16 and torch.equal(table[513], table[512])


def test_eager_scores_are_as_coarse_as_the_activations():
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 40, 32, generator=generator).to(BF16) for _ in range(3))
    theta = torch.tensor([[1.3, 0.7], [0.2, 0.1]])
    got = attend(q, k, v, published("kerple_log"), theta, scale=32**-0.5, backend="eager")
    products = torch.baddbmm(q.new_zeros(1), q[0], k[0].mT, beta=0, alpha=32**-0.5)
    d = torch.arange(40)[:, None] - torch.arange(40)
    bias = published("kerple_log").bias(theta.to(BF16), d.clamp(min=0))
    scores = (products + bias).masked_fill(d < 0, -math.inf)
    assert torch.equal(got[0], torch.softmax(scores, -1) @ v[0])
    exact = attend(q, k, v, load("kerple_log"), theta, scale=32**-0.5, backend="eager")
    assert not torch.equal(got, exact)


def test_gradients_reach_theta_in_its_own_dtype():
    theta = torch.tensor([[1.3, 0.7]], requires_grad=True)
    q = torch.randn(1, 1, 8, 4, generator=torch.Generator().manual_seed(0)).to(BF16)
    attend(q, q, q, published("kerple_log"), theta, scale=0.5, backend="eager").sum().backward()
    assert theta.grad.dtype == torch.float32 and theta.grad.abs().min() > 0


def test_only_eager_can_round_and_auto_knows():
    chosen = choose("auto", published("kerple_log"), device_type="cpu", dtype=BF16)
    assert chosen.name == "eager" and "published_numerics" in chosen.reason
    with pytest.raises(AttentionError, match="published_numerics asks.*use auto, eager"):
        choose("blocked", published("kerple_log"), device_type="cpu", dtype=BF16)
    # nothing is rounded in fp32, so any backend serves
    pos = published("kerple_log", torch.float32)
    assert choose("blocked", pos, device_type="cpu", dtype=torch.float32).name == "blocked"


@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
def test_a_bias_apart_is_added_after_the_product_was_rounded(kind):
    generator = torch.Generator().manual_seed(2)
    layer = kind(64, 8, numerics=PublishedNumerics(BF16))
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    layer, x = layer.to(BF16), torch.randn(50, 64, generator=generator).to(BF16)
    apart = (x @ layer.weight.T) + layer.bias
    assert torch.equal(layer(x), apart)
    layer.numerics = WIDE
    assert not torch.equal(layer(x), apart)


@pytest.mark.parametrize("name", ["rmsnorm", "scalenorm"])
def test_norms_take_their_statistics_in_the_activations_dtype(name):
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(3)).to(BF16)
    plain, rounded = (
        BlockNorm(BlockShape(64, 1, norm=name, norm_eps=1e-6, numerics=n)).to(BF16)
        for n in (WIDE, PublishedNumerics(BF16))
    )
    assert not torch.equal(plain(x), rounded(x))
    torch.testing.assert_close(plain(x), rounded(x), rtol=2e-2, atol=2e-2)
