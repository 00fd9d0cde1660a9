"""Compare every pair of terms in every backend that trains with the reference in float64.

    python -m tests.attention.all_pairs                  # 2 to 10 minutes
    python -m tests.attention.all_pairs --only gate      # the pairs whose name has this in it

The terms are all embeddings, documents and a window. `test_attention_term_backends.py` covers
every pair of slots, that is, one embedding of each kind. The fused kernels run in Triton's
interpreter, in fp32.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import combinations

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from megatron.attention import AttentionError
from megatron.positional import PositionalError, names
from tests.helpers.terms import Case, assert_same


def differences(terms: tuple[str, ...]) -> list[str]:
    """Return a line for each backend whose values or gradients differ from the reference's."""
    case, found = Case(terms, batch=1, size=8), []
    rounded = (x.detach().float().double() for x in case.inputs[:3])
    case.inputs[:3] = [x.requires_grad_() for x in rounded]
    exact = case.run("eager")
    for backend, dtype, tolerance in (
        ("blocked", torch.float64, 1e-12),
        ("fused", torch.float32, 1e-5),
    ):
        try:
            assert_same(case.run(backend, case.rounded(dtype)), exact, tolerance)
        except AssertionError:
            found.append(f"{' + '.join(terms)}: {backend} differs")
        except AttentionError as error:  # the backend refuses this pair
            print(error)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="only pairs with this text")
    args = parser.parse_args()
    compared, found = 0, []
    for terms in combinations((*names(), "documents", "window"), 2):
        if args.only not in " + ".join(terms):
            continue
        try:
            found += differences(terms)
            compared += 1
        except PositionalError as error:  # both have one kind of which a layer has one at most
            print(error)
    print(*found, f"{compared} pairs compared, {len(found)} differences", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
