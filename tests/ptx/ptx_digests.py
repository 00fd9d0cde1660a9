"""Compare the PTX of the fused attention kernels with committed digests (ptx_digests.csv).

    python tests/ptx/ptx_digests.py [--only REGEX]     # recompile listed variants and compare
    python tests/ptx/ptx_digests.py --write [--only REGEX]     # add or replace their digests

Thus a change of the kernels can be shown to leave the PTX of a variant as it was. A digest is the
SHA-256 of the PTX without comments, debug information and empty lines. It depends on Triton's
version. The machine code is not made. A name, for --only, is such as `sm_90 rpe key bf16 64`.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend

from tools import compile_kernels as tool

CSV = Path(__file__).with_name("ptx_digests.csv")


class Made(Exception):
    """The PTX has been made, so that the compilation can stop."""


def bare(ptx: str) -> str:
    """Return a PTX text without comments, debug information, paths and empty lines."""
    code = ptx.partition("\t.section\t.debug")[0]
    lines = (line.partition("//")[0].strip() for line in code.splitlines())
    return "\n".join(x for x in lines if x and not re.match(r"\.(loc|file|section)\b|\$L__tmp", x))


def digest(variant: tool.Variant) -> str:
    """Return the digest of a variant's PTX."""
    make, kept = CUDABackend.make_ptx, []

    def keep(*arguments, **options):
        kept.append(make(*arguments, **options))
        raise Made

    cache = knobs.cache
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(CUDABackend, "make_ptx", keep):
        earlier, cache.dir = cache.dir, folder  # a cached kernel would not be compiled
        try:
            tool.build(variant)
        except Made:
            pass
        finally:
            cache.dir = earlier
    return hashlib.sha256(bare(kept[0]).encode()).hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write ptx_digests.csv")
    parser.add_argument("--only", default=".", help="regular expression of names of variants")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    args = parser.parse_args()
    with CSV.open(newline="") as file:
        written = {row[1]: row for row in csv.reader(file)}
    chosen = [v for v in tool.variants() if re.search(args.only, v.name)]
    if not args.write:
        chosen = [v for v in chosen if v.name in written]
    changed = []
    one = {"initializer": torch.set_num_threads, "initargs": (1,)}  # see `compile_all`
    with ProcessPoolExecutor(args.jobs, **one) as pool:
        for variant, found in zip(chosen, pool.map(digest, chosen), strict=True):
            row = [triton.__version__, variant.name, found]
            if args.write:
                written[variant.name] = row
            elif written[variant.name] != row:
                changed.append(f"{variant.name}: {written[variant.name]}, now {row}")
    if args.write:
        with CSV.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(written.values())
    print("\n".join([*changed, f"{len(chosen)} compiled, {len(changed)} changed"]))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
