"""Execute attention of few queries to many keys in the PTX emulator, against float64.

    python tests/ptx/verify_decode.py --target 90 [--only REGEX] [--seeds 0,1]

The keys are divided into parts, which a second kernel adds up (`megatron.kernels.decode`). A line
has the largest error of the output and of `lse`, divided by their largest true values. For the
output, 16 bits allow three times what rounding q k^T's weights and the output explains. The last
line counts wrong cases.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import torch

from tests.helpers.terms import Case
from tests.ptx.emulator import driver
from tests.ptx.verify import DTYPES, findings

KINDS = ("kerple_log", "kerple_power", "alibi", "none")
ALLOWED = {"bf16": 8e-3, "fp16": 1e-3, "fp32": 3e-6}
"""The allowed error of the output. That of `lse`, which is never rounded to 16 bits, is 3e-6."""


def cases() -> Iterator[tuple[str, str, int, int, int, int]]:
    """Yield (terms, dtype, group, queries, keys, head size)."""
    for kind in KINDS:
        for group in (1, 4, 8):
            yield kind, "bf16", group, 1, 300, 64
    for kind in KINDS[:2]:
        yield kind, "bf16", 8, 3, 530, 128
        yield kind, "fp16", 4, 1, 270, 80
        yield kind, "fp32", 4, 1, 270, 64
    yield "table", "bf16", 4, 2, 300, 64
    yield "bias,documents", "bf16", 4, 3, 530, 64
    yield "bias,window,sink", "bf16", 4, 3, 530, 64
    yield "temperature,weight,sink", "bf16", 4, 1, 300, 128


def verdict(case: Case, dtype: str) -> tuple[list[float], list[str]]:
    """Return the errors of the output and of `lse`, and what is wrong."""
    inputs = case.rounded(DTYPES[dtype])
    driver.LOG.clear()
    with torch.no_grad():
        inputs[3:] = [x.float() for x in inputs[3:]]
        got = case.out("fused", inputs, return_lse=True)
        exact = case.out("eager", [x.double() for x in inputs], return_lse=True)
    errors = [
        ((x.double() - y).abs().max() / y.abs().max()).item()
        for x, y in zip(got, exact, strict=True)
    ]
    wrong = [x for x in findings() if "note:" not in x]
    ran = [entry["name"] for entry in driver.LOG]
    if ran != ["decode_pass", "merge_pass"]:
        wrong.append(f"launched {ran}")
    wrong += [f"out: {errors[0]:.1e}"] * (not errors[0] <= ALLOWED[dtype])
    return errors, wrong + [f"lse: {errors[1]:.1e}"] * (not errors[1] <= ALLOWED["fp32"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=int, default=80, help="80 or 90")
    parser.add_argument("--only", default=".", help="regular expression of cases")
    parser.add_argument("--seeds", default="0,1")
    args = parser.parse_args()
    driver.install(args.target)
    # The emulator has CPU tensors, and `attend` would refuse the backend for them.
    from megatron.attention import fused
    from megatron.kernels import launch

    launch.MANY = 256
    object.__setattr__(fused.BACKEND, "refusal", lambda request: None)
    count = 0
    for terms, dtype, group, queries, keys, size in cases():
        for seed in args.seeds.split(","):
            name = f"{terms} {dtype} E{size} H{group}/1 T{queries} S{keys} seed{seed}"
            if not re.search(args.only, name):
                continue
            shape = (1, group, queries, keys - queries)
            case = Case(terms.split(","), *shape, size=size, group=group, seed=int(seed))
            errors, wrong = verdict(case, dtype)
            mark, shown = "BAD" if wrong else "ok ", " ".join(f"{x:.1e}" for x in errors)
            print(f"{mark} sm_{args.target} {name}: {shown}", *wrong, flush=True)
            count += bool(wrong)
    print(f"{count} wrong")


if __name__ == "__main__":
    main()
