"""Compile the formulas of `tests.kernels.formulas`, execute them, and compare with float64.

    python tests/ptx/verify_formulas.py [--target 90] [--only REGEX]

There is a line for each formula, with two numbers. The first is the largest error of attention in
fp32 (output and all gradients), divided by the largest true value, or by 1 if that is smaller. The
second is the largest error of single logits and their gradients at distances up to 1e6 with theta
at its bounds, divided by what `Confirmation` accepts. The last line is the number of wrong ones. The formulas of sin and
cos are correct without memory of their own: a kernel that had some could not be executed here.
"""

from __future__ import annotations

import argparse
import re

import torch
import triton
import triton.language as tl

from tests.kernels import cases
from tests.kernels.formulas import NAMES, Formula, exact
from tests.ptx.emulator import driver
from tests.ptx.verify import findings

LIMIT, SIDE = 3e-5, 16
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
        f_add(f_zeros(R, 8), tl.where(first, 1.0, 0.0), tile, e, tl.float32), tl.sum(tile, axis=1), c
    )
    tl.store(out_ptr + r * (N + 1), tl.sum(tl.where(first, e[0], 0.0)) * scale)
    for n in tl.static_range(N):
        tl.store(out_ptr + r * (N + 1) + n + 1, gradients[n])


def share_of_allowed(pos: Formula) -> float:
    """Return the largest error at distances up to 1e6, divided by the accepted one."""
    from megatron.attention.formulas import confirm
    from megatron.attention.fused import functions_of

    samples, functions = confirm.Confirmation(pos), functions_of(pos)[0]
    assert not functions.tabulated
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
    wrong = 0
    for what in (name for name in NAMES if re.search(args.only, name)):
        driver.LOG.clear()
        errors = attention_error(what), share_of_allowed(Formula(what))
        bad = findings()
        fails = bool(bad) or not (errors[0] <= LIMIT and errors[1] <= 1.0)
        mark = "BAD" if fails else "ok "
        print(f"{mark} sm_{args.target} {what}: {errors[0]:.1e} {errors[1]:.2f}", *bad, flush=True)
        wrong += fails
    print(f"{wrong} wrong")


if __name__ == "__main__":
    main()
