"""Execute the fused kernels with terms beside plain attention in the PTX emulator.

    python tests/ptx/verify_terms.py [--target 90] [--terms fire,sink] [--dtype fp16] [--heads 2]

The terms are those of `tests.helpers.terms`, and all names of embeddings. The results are compared
with eager attention in float64. The first number of a line is the largest error divided by the
largest true value. For theta's gradient there is a second one, the largest error of a parameter
divided by the root mean square of its true values over heads. The last line is "right" or "wrong".
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch

from tests.helpers.terms import Case
from tests.ptx import oracle
from tests.ptx.emulator import driver
from tests.ptx.verify import DTYPES, LEAST_SIZE, findings


def case_of(args: argparse.Namespace) -> Case:
    """Return a case whose theta has initial values if the embedding computes with hidden units."""
    shape = (1, args.heads, args.queries, args.before)
    case = Case(args.terms.split(","), *shape, size=args.size, group=args.group, seed=args.seed)
    case.grad = case.grad.to(DTYPES[args.dtype]).double()
    if case.pos.reads_position:  # with theta > 0, all hidden units would always be active
        theta = case.pos.initial_theta(args.heads, torch.Generator().manual_seed(2))
        case.inputs[3] = theta.double().requires_grad_()
    return case


def exact_results(case: Case, inputs: list[torch.Tensor], dropout: float) -> list[torch.Tensor]:
    """Return the results of eager attention in float64, with the mask that the kernels will draw.

    The kernels' seed is the first random number after the seed 0.
    """
    wide = [x.detach().double().requires_grad_() for x in inputs]
    (B, H, T, _), S = wide[0].shape, wide[1].shape[2]
    torch.manual_seed(0)
    keep = oracle.mask(int(torch.randint(1 << 62, (1,))), B, H, T, S, dropout)
    factor = torch.from_numpy(keep) / (1.0 - dropout)
    with mock.patch.object(torch.nn.functional, "dropout", lambda probs, p: probs * factor):
        return case.run("eager", wide)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=int, default=80, help="80 or 90")
    parser.add_argument("--terms", default="bias,sink,decay,documents", help="a,b,...")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--queries", type=int, default=150)
    parser.add_argument("--size", type=int, default=16, help="head size")
    parser.add_argument("--group", type=int, default=1, help="query heads of each key head")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0, help="probability")
    parser.add_argument("--before", type=int, default=60, help="keys before the first query")
    args = parser.parse_args()
    driver.install(args.target)
    from megatron.attention.call import Call, lowered
    from megatron.attention.fused import fused, tempers

    case = case_of(args)
    inputs = case.rounded(DTYPES[args.dtype])
    exact = exact_results(case, inputs, args.dropout)
    q, k, v, *rest = inputs
    names = ["out", "dq", "dk", "dv"]
    theta = rest.pop(0) if case.pos.parameters else None
    names += ["dtheta"] if theta is not None else []
    decay = rest.pop() if rest else None
    names += ["ddecay"] if decay is not None else []
    options = case.options | {"decay_BHS": decay, "dropout_p": args.dropout}
    call = Call(q, k, v, case.pos, theta, **options)
    torch.manual_seed(0)
    out = fused(lowered(call, grouped=True, tempered=tempers(call.pos)))
    got = [out, *torch.autograd.grad(out, inputs, case.grad.to(out.dtype))]
    wrong = findings()
    for name, x, y in zip(names, got, exact, strict=True):
        difference = (x.double() - y).abs()
        error = (difference.max() / y.abs().max()).item()
        line = f"sm_{args.target} {name} {error:.1e}"
        if name == "dtheta":
            size = y.square().mean(0).sqrt().clamp(min=LEAST_SIZE * y.abs().max())
            of_parameter = (difference / size).max().item()
            line += f" {of_parameter:.1e}"
            if not of_parameter <= 1e-3:
                wrong.append(f"{name}: {of_parameter:.1e}")
        print(line)
        rounded = 3e-5 if args.dtype == "fp32" else 1e-2
        if not error <= (1e-5 if name in ("dtheta", "ddecay") else rounded):
            wrong.append(f"{name}: {error:.1e}")
    print("\n".join([*wrong, "wrong" if wrong else "right"]))


if __name__ == "__main__":
    main()
