"""Count the rows of dq that are off by more than 10%, where the softmax is almost one-hot.

    python tests/ptx/verify_dq.py [--target 90] [--kind kerple_log]

The product of queries and keys is multiplied by 16. In most rows, one softmax weight is then almost
1, and the row of dq is tiny: a small error of delta = do . o is large in comparison. The fused
kernels run in the PTX emulator, and eager attention computes in the same 16 bits. The truth is
float64. The last line is "wrong" if twice as many rows are off as in eager attention, or if a row
is off that has more than 1e-4 of the length of the longest row. (Below 1e-6, fp32 sums have no
digits left.)
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from tests.ptx import oracle
from tests.ptx.emulator import driver
from tests.ptx.verify import DTYPES, Case, findings, numbers, run


def rows_off(dq: np.ndarray, exact: np.ndarray) -> tuple[int, float]:
    """Return how many rows have an error of more than a tenth of the row's true length.

    The second result is the length of the longest of them, divided by that of the longest row. The
    first row sees one key. Its true gradient is 0, so it is left out.
    """
    errors, sizes = (np.linalg.norm(x[:, :, 1:], axis=-1) for x in (dq - exact, exact))
    off = errors > 0.1 * sizes
    return int(off.sum()), float(np.max(sizes, where=off, initial=0.0) / sizes.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=int, default=80, help="80 or 90")
    parser.add_argument("--kind", default="none", help="positional embedding")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    driver.install(args.target)
    from megatron.attention import attend
    from megatron.positional import load

    mine, theirs, longest = 0, 0, 0.0
    found = []
    for seed in range(args.seeds):
        case = Case(args.kind, args.dtype, 64, H=1, T=128, scale=2.0, seed=seed)
        done = run(case)
        found += [x for x in findings() if "note:" not in x]
        *given, do = (torch.from_numpy(x).to(DTYPES[args.dtype]) for x in done.inputs)
        given = [x.requires_grad_() for x in given]
        theta = None if done.theta is None else torch.from_numpy(done.theta).float()
        out = attend(*given, load(args.kind), theta, scale=2.0, backend="eager")
        eager = numbers(torch.autograd.grad(out, given[0], do)[0])
        exact = oracle.attention(args.kind, *done.inputs, done.theta, 2.0)["dq"]
        (count, length), (of_eager, _) = (rows_off(x, exact) for x in (done.got["dq"], eager))
        print(f"sm_{args.target} {args.kind} {args.dtype} seed {seed}: of 127 rows of dq, {count} "
              f"are off by more than 10%, {of_eager} in eager; the longest has {length:.0e} of the "
              "longest row")  # fmt: skip
        mine, theirs, longest = mine + count, theirs + of_eager, max(longest, length)
    right = not found and mine <= 2 * theirs and longest < 1e-4
    print("\n".join([*found, "right" if right else "wrong"]))


if __name__ == "__main__":
    main()
