"""Compile the Triton kernels of fused attention without a GPU, and report their resources.

    python tools/compile_kernels.py                  # all variants -> tools/compiled_kernels.csv
    python tools/compile_kernels.py --changed        # only variants with a new tile size
    python tools/compile_kernels.py --sample         # the dozen variants that the tests compile
    python tools/compile_kernels.py --source kerple_log   # print generated code, compile nothing

A variant is one pass (one Triton kernel) for one GPU architecture, dtype, head size and distance
kernel. A distance kernel is a bias or a factor of the attention scores that depends only on the
distance between query and key.

The columns of the CSV are Triton's version, the GPU architecture (such as sm_90), the distance
kernel, the pass, the dtype, the head size, the tile (M, N, warps, stages), the registers of a
thread, the bytes that a thread spills, and the bytes of shared memory of a program.

The tool fails if a variant needs more shared memory than the GPU has, or if a variant with 16-bit
inputs and a head size up to 128 spills registers. Other spills are only recorded. The tool needs
torch and triton. Triton's wheel contains the programs ptxas and cuobjdump.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron import entry

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
import torch

try:
    import triton
except ImportError:
    raise SystemExit("tools/compile_kernels.py needs triton (requirements-dev.txt)") from None
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from megatron.attention.fused import functions_of
from megatron.kernels.codegen import DeviceFunctions
from megatron.kernels.launch import OPTIONS, PASSES, constants
from megatron.kernels.tile_sizes import SHARED_MEMORY, Tile, look_up, padded
from megatron.positional import PositionalEmbedding, PositionalError, load

CSV = Path(__file__).with_name("compiled_kernels.csv")
TARGETS = (80, 86, 90)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAD_SIZES = (16, 32, 64, 80, 96, 128, 256)
# The distance kernels to compile. Other embeddings compile to the same code as one of these:
# kerple_power_original and alibi_learned as alibi, sandwich as rpe without its gradient, and
# embeddings without a distance kernel as none. The Gaussian kernels and kerple_sum are not listed.
KERNELS = ("kerple_log", "kerple_log3", "kerple_power", "kerple_power_mul", "kerple_power_add_mul",
           "alibi", "rpe", "none")  # fmt: skip
SAMPLE = (
    (90, "kerple_log", "bf16", 64), (90, "kerple_power_add_mul", "bf16", 128),
    (90, "kerple_log", "fp16", 80), (90, "rpe", "bf16", 64), (90, "kerple_log", "fp32", 64),
    (80, "kerple_log", "bf16", 64), (80, "kerple_log3", "fp16", 128), (80, "none", "bf16", 96),
    (80, "alibi", "bf16", 32), (86, "kerple_power", "bf16", 64), (86, "rpe", "fp16", 128),
    (80, "kerple_power_mul", "fp32", 16),
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """What to compile.

    Attributes:
        target: The GPU's compute capability, such as 90.
        kernel: The name of the distance kernel.
        dtype: `bf16`, `fp16` or `fp32`.
        head_size: The dimensions of each attention head.
        which: The pass, a key of `PASSES`.
    """

    target: int
    kernel: str
    which: str
    dtype: str
    head_size: int


@dataclass(frozen=True)
class Row:
    """A line of the CSV: the resources of one compiled variant (see the module docstring)."""

    triton: str
    target: str
    kernel: str
    which: str
    dtype: str
    head_size: int
    M: int
    N: int
    warps: int
    stages: int
    registers: int
    spilled: int
    shared: int

    @property
    def wrong(self) -> str | None:
        """The reason why this variant cannot be used on its GPU, or None."""
        family = int(self.target.removeprefix("sm_"))
        where = f"{self.target} {self.kernel} {self.which} {self.dtype} {self.head_size}"
        if self.shared > SHARED_MEMORY[family]:
            return f"{where}: {self.shared} bytes of shared memory of {SHARED_MEMORY[family]}"
        if self.spilled and self.dtype != "fp32" and self.head_size <= 128:
            return f"{where}: a thread spills {self.spilled} bytes"
        return None


def variants(sample: bool) -> Iterator[Variant]:
    every = ((t, k, d, e) for t in TARGETS for k in KERNELS for d in DTYPES for e in HEAD_SIZES)
    for target, kernel, dtype, size in SAMPLE if sample else every:
        for which in PASSES:
            if which != "table" or kernel == "rpe":
                yield Variant(target, kernel, which, dtype, size)


@lru_cache
def kernel_of(name: str) -> tuple[PositionalEmbedding, DeviceFunctions]:
    pos = load(name)
    return pos, functions_of(pos)[0]


def tile_of(variant: Variant) -> Tile:
    """Return the tile size from `tile_sizes.TABLE` that training uses for a variant."""
    itemsize, size = DTYPES[variant.dtype].itemsize, padded(variant.head_size)
    _, functions = kernel_of(variant.kernel)
    return getattr(look_up(variant.target, itemsize, size, functions.heavy), variant.which)


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        _, *lines = csv.reader(file)
    kinds: list[Any] = [int if field.type == "int" else str for field in fields(Row)]
    return [Row(*(kind(x) for kind, x in zip(kinds, line, strict=True))) for line in lines]


def unchanged(rows: list[Row], wanted: list[Variant]) -> dict[Variant, Row]:
    """Return the rows of an earlier table that need no new compilation, in a dict by variant.

    These rows are of variants in `wanted`, compiled with the current Triton version and tile size.
    Changes to the source code of the kernels are not noticed.
    """
    written = {astuple(row)[1:6]: row for row in rows if row.triton == triton.__version__}
    return {
        variant: row
        for variant in wanted
        if (row := written.get((f"sm_{variant.target}", *astuple(variant)[1:])))
        and (row.M, row.N, row.warps, row.stages) == astuple(tile_of(variant))
    }


def build(variant: Variant) -> Row:
    """Compile one variant for pointers and strides that are divisible by 16, as at run time."""
    tile, (pos, functions) = tile_of(variant), kernel_of(variant.kernel)
    fixed = {"group": 1} | constants(
        variant.which, functions, tile, variant.head_size, dropout=False, theta=pos.learnable
    )
    function = PASSES[variant.which]
    pointers = {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "sums_ptr": "*fp32",
                "theta_ptr": "*fp32", "seed_ptr": "*i64"}  # fmt: skip
    signature, attributes = {}, {}
    for n, name in enumerate(function.arg_names):
        if name in fixed:
            signature[name] = "constexpr"
            continue
        if name.endswith("_ptr"):
            signature[name] = pointers.get(name, f"*{variant.dtype}")
        else:
            signature[name] = "fp32" if name in ("scale", "rescale") else "i32"
        if name.endswith("_ptr") or re.fullmatch(r"\w+_[bht]", name):
            attributes[n,] = [["tt.divisibility", 16]]
    values = {name: value for name, value in fixed.items() if name in function.arg_names}
    options = {"num_warps": tile.warps, "num_stages": tile.stages} | OPTIONS
    source = ASTSource(function, signature, values, attributes)
    target = GPUTarget("cuda", variant.target, 32)
    compiled = compile_kernel(source, target=target, options=options)
    registers, stack = resources(compiled.asm["cubin"])
    return Row(
        *(triton.__version__, f"sm_{variant.target}", variant.kernel, variant.which),
        *(variant.dtype, variant.head_size, tile.M, tile.N, tile.warps, tile.stages),
        *(registers, stack, compiled.metadata.shared),
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers, bytes of stack) of a thread in a compiled Triton kernel.

    The stack holds only spilled registers, so its size is the number of spilled bytes.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if not found:
        raise RuntimeError(f"cuobjdump did not report what the kernel uses:\n{text}")
    return int(found[1]), int(found[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sample", action="store_true", help="only a dozen variants")
    parser.add_argument("--changed", action="store_true", help="keep the CSV's rows of these tiles")
    parser.add_argument("--out", type=Path, help="CSV to write (all variants: the committed one)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--source", metavar="POS_EMB", help="print its device functions and stop")
    args = parser.parse_args()
    if args.out and not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: no such folder as {args.out.parent}; make it first")
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: at least 1")
    if args.source:
        try:
            functions, how = functions_of(load(args.source))
        except PositionalError as error:
            parser.error(f"--source {args.source}: {error}")
        print(f"# {args.source}: {how}\n\n{functions.source}".rstrip())
        return 0
    wanted = list(variants(args.sample))
    found = unchanged(read_rows(CSV), wanted) if args.changed else {}
    missing = [variant for variant in wanted if variant not in found]
    with ProcessPoolExecutor(args.jobs) as pool:
        for variant, row in zip(missing, pool.map(build, missing, chunksize=4), strict=True):
            found[variant] = row
            print(",".join(str(value) for value in astuple(row)), flush=True)
    rows = [found[variant] for variant in wanted]
    out = args.out or (None if args.sample else CSV)
    if out:
        with out.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["pass" if f.name == "which" else f.name for f in fields(Row)])
            writer.writerows(astuple(row) for row in rows)
    wrong = [row.wrong for row in rows if row.wrong]
    print("\n".join([f"{len(missing)} kernels compiled", *wrong]), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    entry.run(main)
