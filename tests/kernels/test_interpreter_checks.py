"""Test that the faster interpreter of the tests still computes and checks as Triton's does."""

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


@triton.jit
def mix(x, y, out, count, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    a, b = tl.load(x + rows), tl.load(y + columns)
    inside = (rows < count) & (columns >= 1)
    value = tl.where(inside, a * 2 + b // 3 - rows, b)
    tl.store(out + rows * N + columns, tl.where(a > b, value, 1.5 * value))


def test_values_of_different_shapes_are_combined():
    """Columns, rows, blocks and numbers; the result is that of torch."""
    x = torch.tensor([[3], [-8], [5], [40]], dtype=torch.int32)
    y = torch.tensor([[7, -2, 9, 4, 11, 0, -5, 6]], dtype=torch.int32)
    out = torch.zeros(4, 8)
    mix[(1,)](x, y, out, 3, M=4, N=8)
    rows, columns = torch.arange(4)[:, None], torch.arange(8)[None, :]
    quotient = torch.div(y, 3, rounding_mode="trunc")
    value = torch.where((rows < 3) & (columns >= 1), x * 2 + quotient - rows, y)
    torch.testing.assert_close(out, torch.where(x > y, value.float(), 1.5 * value))


@triton.jit
def wrong(x, out, CASE: tl.constexpr):
    block = tl.arange(0, 4)
    if CASE == "shapes":
        tl.store(out, tl.sum(block + tl.arange(0, 8)))
    elif CASE == "pointer":
        tl.store(out, tl.load(x * block))
    elif CASE == "overflow":
        tl.store(out, tl.sum((block + 2147483645) // 2))
    else:
        tl.store(out, tl.sum(block.to(tl.float32) * 36893488147419103232))


REFUSED = {
    "shapes": "shape", "pointer": "unexpected type pointer", "overflow": "int32 overflow",
    "number": "Nonrepresentable integer",
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_triton_refuses_is_refused(case):
    x, out = torch.zeros(4, dtype=torch.int32), torch.zeros(1)
    with pytest.raises(Exception, match=REFUSED[case]):
        wrong[(1,)](x, out, CASE=case)
