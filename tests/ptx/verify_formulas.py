"""Compile the formulas of `tests.kernels.formulas`, execute them, and compare with float64.

    python tests/ptx/verify_formulas.py [--target 90] [--only REGEX]

The first line has the largest error of the device functions `cosine` and `sine`. Each formula then
has a line with two numbers. The first is the largest error of attention in fp32 (output and all
gradients), divided by the largest true value, or by 1 if that is smaller. The second is the largest
error of single logits and their gradients at distances up to 1e6 with theta at its bounds, divided
by the error that `Confirmation` accepts; `table` stands for a formula that is tabulated. The last
line is the number of wrong results. The emulator stops where a kernel uses local memory.
"""

from __future__ import annotations

import argparse
import re

import torch
import triton
import triton.language as tl

from megatron.kernels.device import cosine, sine
from tests.kernels import cases
from tests.kernels.formulas import NAMES, Formula, exact
from tests.ptx.emulator import driver
from tests.ptx.verify import findings

LIMIT, ANGLE_LIMIT, SIDE = 3e-5, 1.2e-6, 16
THETA = [[0.5, 0.75], [1.25, 0.41]]


@triton.jit
def logits_and_terms(
    theta_ptr, s_ptr, d_ptr, out_ptr, scale,
    f_prepare: tl.constexpr, f_evaluate: tl.constexpr, f_zeros: tl.constexpr,
    f_add: tl.constexpr, f_finish: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Store a logit and its gradient. The score is the first of the tile [R, R] of program r.

    All scores of a tile are the same, but they are loaded, so that the compiler does not know it.
    """
    r = tl.program_id(0)
    c = f_prepare(theta_ptr + r * N, N, scale)
    place = tl.arange(0, R)[:, None] * R + tl.arange(0, R)[None, :]
    tile, first = tl.zeros([R, R], dtype=tl.float32), place == 0
    s, d = tl.load(s_ptr + r * R * R + place), tl.load(d_ptr + r * R * R + place)
    e = f_evaluate(s, d, tile, 0, c, None)
    gradients = f_finish(
        f_add(f_zeros(R, 8), tl.where(first, 1.0, 0.0), tile, e, tl.float32),
        tl.sum(tile, axis=1),
        c,
    )
    tl.store(out_ptr + r * (N + 1), tl.sum(tl.where(first, e[0], 0.0)) * scale)
    for n in tl.static_range(N):
        tl.store(out_ptr + r * (N + 1) + n + 1, gradients[n])


@triton.jit
def cosines_and_sines(x_ptr, out_ptr, R: tl.constexpr):
    """Store the cosines of R numbers, followed by their sines."""
    place = tl.arange(0, R)
    x = tl.load(x_ptr + place)
    tl.store(out_ptr + place, cosine(x))
    tl.store(out_ptr + R + place, sine(x))


def angle_error() -> float:
    """Return the largest error of cosines and sines of angles of any size up to 2e7."""
    sizes = torch.logspace(-6, 7.3, 4088, dtype=torch.float64)
    sizes[::2] *= -1
    corners = [0.0, torch.pi, -torch.pi / 2, 1e6, 999_999.5, 2e7, 355.0, -710.0]
    x = torch.cat((sizes, torch.tensor(corners))).float()
    got = torch.empty(2, 4096)
    cosines_and_sines[(1,)](x, got, 4096)
    return (got.double() - torch.stack((x.double().cos(), x.double().sin()))).abs().max().item()


def share_of_allowed(pos: Formula) -> float | None:
    """Return the largest error at distances up to 1e6, divided by the accepted one.

    Return None for a tabulated formula.
    """
    from megatron.attention.formulas import confirm
    from megatron.attention.fused import functions_of

    samples, functions = confirm.Confirmation(pos), functions_of(pos)[0]
    if functions.tabulated:
        return None
    theta, s, d, _ = (x.float().contiguous() for x in samples.inputs)
    s, d = (x[:, None].expand(-1, SIDE * SIDE).contiguous() for x in (s, d))
    got = torch.empty(len(theta), 1 + theta.shape[1])
    logits_and_terms[(len(theta),)](
        theta, s, d, got, confirm.SCALE, functions.prepare, functions.evaluate, functions.zeros,
        functions.add, functions.finish, theta.shape[1], SIDE,
    )  # fmt: skip
    return samples.worst(got.double(), *confirm.FP32)


def attention_error(what: str) -> float:
    """Return the largest relative error of the output and of the gradients."""
    from megatron.attention.call import Call
    from megatron.attention.fused import fused

    case = cases.make(Formula(what), 1, 2, 70, 16)
    case.inputs[3] = torch.tensor(THETA).requires_grad_()
    true = exact(what, case.inputs, case.grad, 0.35)
    *qkv, theta = case.inputs
    out = fused(Call(*qkv, case.pos, theta, scale=0.35))
    got = [out, *torch.autograd.grad(out, case.inputs, case.grad)]
    return max(
        ((x.double() - y).abs().max() / y.abs().max().clamp(min=1.0)).item()
        for x, y in zip(got, true, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=int, default=80, help="80 or 90")
    parser.add_argument("--only", default=".", help="regular expression of names of formulas")
    args = parser.parse_args()
    driver.install(args.target)
    error = angle_error()
    wrong = not error <= ANGLE_LIMIT
    print(f"{'BAD' if wrong else 'ok '} sm_{args.target} cosine and sine: {error:.1e}")
    for what in (name for name in NAMES if re.search(args.only, name)):
        driver.LOG.clear()
        near, far, bad = attention_error(what), share_of_allowed(Formula(what)), findings()
        fails = bool(bad) or not near <= LIMIT or not (far or 0.0) <= 1.0
        mark, shown = "BAD" if fails else "ok ", "table" if far is None else f"{far:.2f}"
        print(f"{mark} sm_{args.target} {what}: {near:.1e} {shown}", *bad, flush=True)
        wrong += fails
    print(f"{wrong} wrong")


if __name__ == "__main__":
    main()
