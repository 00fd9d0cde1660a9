"""Execute the fused kernels with sink, decay and documents in the PTX emulator, in bf16.

    python tests/ptx/verify_terms.py [--target 90] [--queries 150] [--distance table]

The results are compared with eager attention in float64. The last line is "right" or "wrong".
"""

from __future__ import annotations

import argparse

import torch

from tests.helpers.terms import Case
from tests.ptx.emulator import driver

NAMES = ("out", "dq", "dk", "dv", "dtheta", "ddecay")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=int, default=80, help="80 or 90")
    parser.add_argument("--queries", type=int, default=150)
    parser.add_argument("--distance", default="bias", help="bias, weight or table")
    args = parser.parse_args()
    driver.install(args.target)
    from megatron.attention.call import Call, lowered
    from megatron.attention.fused import fused

    terms = (args.distance, "sink", "decay", "documents")
    case = Case(terms, 1, 1, args.queries, 60, size=16, seed=2)
    case.grad = case.grad.bfloat16().double()
    inputs = case.rounded(torch.bfloat16)
    exact = case.run("eager", [x.detach().double().requires_grad_() for x in inputs])
    *given, decay = inputs
    given.insert(3, case.pos)
    out = fused(lowered(Call(*given, decay_BHS=decay, **case.options), grouped=True))
    got = [out, *torch.autograd.grad(out, inputs, case.grad.to(out.dtype))]
    wrong = [line for entry in driver.LOG for line in entry["findings"].lines()]
    for name, x, y in zip(NAMES, got, exact, strict=True):
        error = ((x.double() - y).abs().max() / y.abs().max()).item()
        print(f"sm_{args.target} {name} {error:.1e}")
        if not error <= (1e-5 if name in ("dtheta", "ddecay") else 1e-2):
            wrong.append(f"{name}: {error:.1e}")
    print("\n".join([*wrong, "wrong" if wrong else "right"]))


if __name__ == "__main__":
    main()
