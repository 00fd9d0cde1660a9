"""Test that the faster interpreter of the tests still checks whole numbers for an overflow."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def combine(x, y, out, SIGN: tl.constexpr):
    a, b = tl.load(x), tl.load(y)
    if SIGN == 0:
        tl.store(out, a * b)
    else:
        tl.store(out, a + b if SIGN > 0 else a - b)


@pytest.mark.parametrize(
    ("sign", "a", "b", "fits"),
    [
        (1, 2**31 - 2, 1, True),
        (1, 2**31 - 1, 1, False),
        (-1, -(2**31), 1, False),
        (0, 2**15, 2**16 - 1, True),
        (0, 2**15, 2**16, False),
    ],
)
def test_an_overflow_is_found(sign, a, b, fits):
    x, y, out = (torch.tensor([value], dtype=torch.int32) for value in (a, b, 0))
    if fits:
        combine[(1,)](x, y, out, SIGN=sign)
        assert out.item() == a * b if sign == 0 else a + sign * b
    else:
        with pytest.raises(Exception, match="int32 overflow"):
            combine[(1,)](x, y, out, SIGN=sign)
