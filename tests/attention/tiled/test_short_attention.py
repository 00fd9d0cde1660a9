"""Test attention of short sequences against eager attention in float64, and what it leaves out."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.attention import attend
from megatron.attention.tiled import short_attention, tiles
from megatron.attention.tiled.short_attention import ShortAttention
from megatron.attention.tiled.toeplitz import diagonal_sums
from megatron.positional import load
from tests.helpers.embeddings import PLAIN

WEIGHTED = ("kerple_power_mul", "kerple_power_add_mul", "gaussian_mul")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 1e-2}


def case(name, shape, dtype):
    """Return (pos, q, k, v, theta or nothing), with the strides that a model's projection gives."""
    batch, heads, length, size = shape
    generator = torch.Generator().manual_seed(3)
    packed = torch.randn(batch, length, heads, 3 * size, generator=generator).to(dtype)
    inputs = [x.transpose(1, 2) for x in packed.split(size, dim=-1)]
    pos = load(name)
    if pos.kind == "distance":
        wide = torch.promote_types(dtype, torch.float32)
        inputs.append(pos.initial_theta(heads, generator).to(wide) + 0.05)
    return pos, [x.requires_grad_() for x in inputs]


def run(backend, pos, inputs, **options):
    """Return [output, gradient of each input], in float64, and how often the short way was used."""
    generator = torch.Generator().manual_seed(4)
    with mock.patch.object(ShortAttention, "apply", wraps=ShortAttention.apply) as short:
        out = attend(*inputs[:3], pos, *inputs[3:], scale=0.25, backend=backend, **options)
    grad = torch.randn(out.shape, generator=generator).to(out.dtype)
    found = [out, *torch.autograd.grad(out, inputs, grad)]
    assert [x.dtype for x in found[1:]] == [x.dtype for x in inputs]
    return [x.double() for x in found], short.call_count


def assert_exact(pos, inputs, tolerance, calls=1, **options):
    found, count = run("blocked", pos, inputs, **options)
    exact, _ = run("eager", pos, [x.detach().double().requires_grad_() for x in inputs], **options)
    assert count == calls
    for got, true in zip(found, exact, strict=True):
        assert (got - true).abs().max() <= tolerance * true.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", PLAIN)
def test_every_embedding(name, dtype):
    """With 71 rows there are two blocks, of 35 and 36 rows."""
    calls = 0 if name in WEIGHTED or load(name).reads_position else 1
    assert_exact(*case(name, (2, 3, 71, 16), dtype), TOLERANCE[dtype], calls)


def test_the_shape_of_the_quickstart_is_exact():
    assert_exact(*case("kerple_log", (16, 4, 128, 32), torch.float32), 1e-6)


@given(
    batch=st.integers(1, 5),
    heads=st.integers(1, 3),
    length=st.integers(1, 90),
    rows=st.integers(1, 40),
    scores=st.sampled_from([1, 3000, 1 << 20]),
)
def test_any_tiles(batch, heads, length, rows, scores):
    limits = {"MIN_ROWS": 1, "MAX_ROWS": rows, "BUFFER_ELEMENTS": scores}
    with mock.patch.multiple(tiles, **limits):
        assert_exact(*case("kerple_log", (batch, heads, length, 16), torch.float64), 1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"starts_BS": torch.tensor([[0] * 20 + [20] * 20] * 2)},
        {"window": 7},
    ],
    ids=lambda options: next(iter(options)),
)
def test_documents_and_windows_are_left_to_blocks(options):
    inputs = case("kerple_log", (2, 3, 40, 16), torch.float32)
    assert_exact(*inputs, 1e-6, calls=0, **options)


@pytest.mark.parametrize("name", ["sink", "kerple_log + sink"])
def test_sinks_are_left_to_blocks(name):
    pos = load(name)
    inputs = case("none", (2, 3, 40, 16), torch.float32)[1]
    inputs.append((pos.initial_theta(3) + 0.05).requires_grad_())
    assert_exact(pos, inputs, 1e-6, calls=0)


def test_dropout_long_sequences_and_other_lengths_are_left_to_blocks():
    pos, inputs = case("kerple_log", (1, 2, 40, 16), torch.float32)
    assert run("blocked", pos, inputs, dropout_p=0.1)[1] == 0
    with mock.patch.object(short_attention, "LONGEST", 39):
        assert run("blocked", pos, inputs)[1] == 0
    few = [inputs[0][:, :, :30].detach().requires_grad_(), *inputs[1:]]
    assert run("blocked", pos, few, query_offset=10)[1] == 0
    size_2 = case("kerple_log", (1, 2, 40, 2), torch.float32)  # P would be too large to keep
    assert run("blocked", *size_2)[1] == 0


def test_only_wanted_gradients_and_nothing_kept_without_them():
    pos, (q, k, v, theta) = case("kerple_log", (2, 2, 64, 16), torch.float64)
    out = attend(q, k, v, pos, theta.detach(), scale=0.25, backend="blocked")
    assert out.transpose(1, 2).is_contiguous()  # as the next layer reads it
    torch.autograd.grad(out.sum(), [q, k, v])
    with torch.no_grad():
        assert torch.equal(attend(q, k, v, pos, theta, scale=0.25, backend="blocked"), out)


@given(heads=st.integers(1, 3), rows=st.integers(1, 9), first=st.integers(0, 12))
def test_diagonal_sums_in_the_usual_order(heads, rows, first):
    keys = first + rows
    d = torch.arange(first, keys)[:, None] - torch.arange(keys)
    matrix = torch.randint(-50, 50, (heads, rows, keys)).double().masked_fill(d < 0, 0.0)
    expected = torch.stack([matrix[:, d == n].sum(1) for n in range(keys)], dim=1)
    assert torch.equal(diagonal_sums(matrix, first), expected)


def test_second_derivatives_are_refused():
    pos, inputs = case("kerple_log", (1, 2, 20, 16), torch.float64)
    out = attend(*inputs[:3], pos, inputs[3], scale=0.25, backend="blocked")
    (first,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(first.sum(), inputs[1])
