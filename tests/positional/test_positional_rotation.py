"""Test rotary and sinusoidal embeddings against complex numbers in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.positional import PositionalError, load

ROTARY = load("rotary")


def frequencies(dim: int, base: float) -> np.ndarray:
    """Return the frequencies rounded to fp32, as in published models."""
    exponent = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (1.0 / torch.pow(base, torch.from_numpy(exponent))).double().numpy()


def turned(x: np.ndarray, offset: int, ndims: int, base: float) -> np.ndarray:
    """Rotate dimensions m and m + ndims/2 as one complex number, by a factor exp(i angle)."""
    angle = np.outer(offset + np.arange(x.shape[-2]), frequencies(ndims, base))
    half = ndims // 2
    z = (x[..., :half] + 1j * x[..., half:ndims]) * np.exp(1j * angle)
    return np.concatenate((z.real, z.imag, x[..., ndims:]), axis=-1)


@given(
    length=st.integers(1, 40),
    half=st.integers(1, 4),
    kept=st.integers(0, 3),
    offset=st.integers(0, 5000),
    base=st.sampled_from([10000.0, 500.0]),
)
def test_rotate_is_a_complex_product(length, half, kept, offset, base):
    generator = torch.Generator().manual_seed(length)
    shape = 2, 3, length, 2 * half + kept
    q, k = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    got_q, got_k = ROTARY.rotate(q, k, offset=offset, rotary_ndims=2 * half, base=base)
    np.testing.assert_allclose(got_q, turned(q.numpy(), offset, 2 * half, base), atol=1e-11)
    np.testing.assert_allclose(got_k, turned(k.numpy(), offset, 2 * half, base), atol=1e-11)


def test_products_depend_on_distance_alone():
    q, k = torch.randn(1, 1, 1, 16).double(), torch.randn(1, 1, 1, 16).double()
    products = []
    for i, j in ((9, 2), (107, 100), (4007, 4000)):
        q_i, k_j = (
            ROTARY.turn(x, torch.tensor([[at]]), None, 10000.0) for x, at in ((q, i), (k, j))
        )
        products.append((q_i * k_j).sum())
    torch.testing.assert_close(products[1:], [products[0]] * 2, rtol=0, atol=1e-9)


def test_pieces_equal_the_whole():
    """Rotating pieces at their offsets, as with a cache, equals rotating all at once."""
    q, k = torch.randn(2, 2, 30, 8), torch.randn(2, 2, 30, 8)
    whole = ROTARY.rotate(q, k, rotary_ndims=4)
    first = ROTARY.rotate(q[:, :, :12], k[:, :, :12], rotary_ndims=4)
    rest = ROTARY.rotate(q[:, :, 12:], k[:, :, 12:], offset=12, rotary_ndims=4)
    for one, a, b in zip(whole, first, rest, strict=True):
        assert torch.equal(one, torch.cat((a, b), dim=2))


def test_bfloat16_is_rounded_once_at_the_end():
    q = torch.randn(1, 1, 3000, 8).bfloat16()
    got, _ = ROTARY.rotate(q, q)
    exact, _ = ROTARY.rotate(q.float(), q.float())
    assert got.dtype == torch.bfloat16 and torch.equal(got, exact.bfloat16())


def test_impossible_sizes_are_refused():
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(PositionalError, match="3 is odd"):
        ROTARY.rotate(q, q, rotary_ndims=3)
    with pytest.raises(PositionalError, match="rotary_ndims is 10, but a head has 8"):
        ROTARY.rotate(q, q, rotary_ndims=10)
    with pytest.raises(PositionalError, match="7 is odd"):
        load("sinusoidal").table(torch.arange(3), 7)


@pytest.mark.parametrize("dtype,atol", [(torch.float64, 1e-12), (torch.float32, 1e-3)])
def test_sinusoidal_table(dtype, atol):
    """fp32 angles near 5,000 have errors of about 3e-4."""
    positions = torch.tensor([[0, 1, 2], [511, 4999, 77]])
    angle = positions.numpy()[..., None] * frequencies(12, 10000.0)
    got = load("sinusoidal").table(positions, 12, dtype)
    assert got.dtype == dtype and got.shape == (2, 3, 12)
    np.testing.assert_allclose(got[..., :6], np.sin(angle), atol=atol)
    np.testing.assert_allclose(got[..., 6:], np.cos(angle), atol=atol)
