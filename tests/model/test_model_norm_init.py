"""Test norms against their formulas, and initial values against their distributions."""

import math

import pytest
import torch

from megatron.model import BlockShape, GPTShape
from megatron.model.block_norm import BlockNorm
from megatron.model.init import draw
from megatron.parallel.rng import named_generator

SHAPE = GPTShape(num_layers=8, vocab_size=64, block=BlockShape(64, 1), max_positions=8)


def norm_of(name, size, eps):
    return BlockNorm(BlockShape(size, 1, norm=name, norm_eps=eps))


def test_rmsnorm_has_eps_outside_the_root_as_published():
    x = torch.randn(3, 5, dtype=torch.float64)
    norm = norm_of("rmsnorm", 5, 0.1).double()
    with torch.no_grad():
        norm.scale.uniform_()
    expected = x / (x.square().mean(-1, keepdim=True).sqrt() + 0.1) * norm.scale
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-14)


def test_scalenorm():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    norm = norm_of("scalenorm", 2, 1e-5)
    with torch.no_grad():
        norm.g.fill_(2.0)
    torch.testing.assert_close(norm(x), torch.tensor([[1.2, 1.6], [0.0, 0.0]]))


def test_norm_statistics_are_fp32_under_bf16():
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    out = norm_of("rmsnorm", 4096, 1e-8).bfloat16()(x)
    assert out.dtype == torch.bfloat16
    assert (out == 1.0).all()  # bf16 sums would stop growing at 256 addends


def test_an_unknown_norm_is_named():
    with pytest.raises(ValueError, match="batchnorm.*layernorm, rmsnorm or scalenorm"):
        norm_of("batchnorm", 4, 1e-5)


@pytest.mark.parametrize(
    ("method", "std"),
    [
        ("normal", 0.02),
        ("scaled_normal", 0.02 / math.sqrt(2 * 8)),
        ("small_init", math.sqrt(2 / (5 * 64))),
        ("wang_init", 2 / 8 / math.sqrt(64)),
        ("xavier_normal", math.sqrt(2 / (256 + 400))),
        ("xavier_uniform", math.sqrt(2 / (256 + 400))),
    ],
)
def test_standard_deviations(method, std):
    shape = torch.Size((256, 400))
    value = draw(method, shape, named_generator(3, method), SHAPE)
    assert value.dtype == torch.float32
    assert abs(value.std().item() / std - 1) < 0.01
    assert abs(value.mean().item()) < std / 50


def test_orthogonal_rows_are_orthogonal():
    for method, gain in (("orthogonal", 2.0), ("scaled_orthogonal", 2.0 / 8)):
        value = draw(method, torch.Size((16, 32)), named_generator(3, "x"), SHAPE)
        torch.testing.assert_close(value @ value.T, gain * torch.eye(16), atol=1e-5, rtol=0)
