"""Compile the Triton kernels of fused attention without a GPU, and report their resources.

    python tools/compile_kernels.py                  # all variants -> tools/compiled_kernels.csv
    python tools/compile_kernels.py --only 'sm_90 .* bf16'    # only these; keep all other rows
    python tools/compile_kernels.py --changed        # only new variants and new tile sizes
    python tools/compile_kernels.py --source kerple_log   # print generated code, compile nothing

A variant is one pass (one Triton kernel) for one GPU architecture, dtype, head size and distance
kernel, with or without dropout. A distance kernel adds a bias to the attention scores or multiplies
them by a factor. The bias or factor depends only on the distance between query and key. A variant
may combine a distance kernel with other terms of attention, for example
`kerple_log + forget_gate + documents`. --only takes a regular expression for the names of variants.
Examples of names are `sm_90 rpe key bf16 64` and `sm_90 rpe key bf16 64 dropout`.

The columns of the CSV are:

- Triton's version, the GPU architecture (such as sm_90), the distance kernel, the pass, the dtype,
  the head size, whether there is dropout (0 or 1), and how many query heads share a key head (the
  group: all groups above 1 have the same code);
- the tile (M, N, warps, stages);
- the registers of a thread, the bytes that a thread spills, and the shared memory in bytes;
- whether matrix products are serialised (1 if ptxas reports that each product waits for the product
  before it);
- the number of special functions (log2, exp2, 1/x) per attention score in the costliest loop.

The tool fails if a variant needs more shared memory than the GPU has, if its matrix products are
serialised, or if a variant with 16-bit inputs and a head size up to 128 spills registers. For fp32
and for larger heads, spills are recorded but accepted. The CSV is written after each variant, so a
run that was stopped can be continued with --changed.
"""

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, astuple
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from megatron import entry

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
import torch

try:
    import triton
    from triton import knobs
except ImportError:
    raise SystemExit("tools/compile_kernels.py needs triton (requirements-dev.txt)") from None
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from megatron.attention.fused import functions_of
from megatron.kernels.compiled_variants import OPTIONS, PASSES, constants, order
from megatron.kernels.device_functions import DeviceFunctions
from megatron.kernels.tile_sizes import Tile, family, few_rows, look_up, padded
from megatron.positional import PositionalEmbedding, PositionalError, load
from tools.compiled.kernel_table import Row, Variant, read_rows, summary, write
from tools.compiled.machine_code import resources, special_functions

CSV = Path(__file__).with_name("compiled_kernels.csv")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HALF = ("bf16", "fp16")
SIZES, USUAL = (16, 32, 64, 80, 96, 128, 256), (64, 128)
KERNELS = ("kerple_log", "kerple_log3", "kerple_power", "kerple_power_mul", "kerple_power_add_mul",
           "alibi", "rpe", "none")  # fmt: skip
# These for fewer head sizes. Others compile to the same code as a listed one, as alibi or none.
OTHERS = ("kerple_sum", "gaussian", "gaussian3", "gaussian_mul", "alibi_learned", "sandwich",
          "fire", "log_n", "bam", "kerple_log + tempered_bias")  # fmt: skip
# Terms beside the distance kernel, and the tensors that they need. A window is like documents, and
# rotary embeddings are not in the Triton kernels. A tempered bias is `log_n` with `temper_bias`.
TERMS = {"documents": ("first", "end"), "sink": ("sink",), "forget_gate": ("high", "low", "ddecay")}
CROSSES = ("kerple_log + forget_gate + documents", "kerple_power_mul + sink + documents",
           "log_n + forget_gate + sink")  # fmt: skip
AMPERE_AND_HOPPER = (90, 80, 86)
# With groups of query heads that share a key head. All groups above 1 have the same code.
GROUP = 4
GROUPED = ("kerple_log", "kerple_power", "alibi", "none", "rotary + kerple_log")
ALONE, GROUPS = tuple(PASSES)[:5], ("query", "key", "decode", "merge")
ONLY = {"table": "rpe", "hidden": "fire", "merge": "none"}  # passes of one distance kernel
# Each entry is (targets, distance kernels, dtypes, head sizes, dropout, group).
LISTED: Any = (
    (AMPERE_AND_HOPPER, KERNELS, HALF, SIZES, False, 1),
    (AMPERE_AND_HOPPER, KERNELS, ("fp32",), (16, 64, 128, 256), False, 1),
    (AMPERE_AND_HOPPER, KERNELS, HALF, USUAL, True, 1),
    (AMPERE_AND_HOPPER, OTHERS, HALF, USUAL, False, 1),
    ((100, 120), KERNELS, ("bf16",), USUAL, False, 1),
    ((90,), (*TERMS, *CROSSES), HALF, USUAL, False, 1),
    ((90,), (*TERMS, *CROSSES, *OTHERS), HALF, USUAL, True, 1),
    (AMPERE_AND_HOPPER, GROUPED, HALF, USUAL, False, GROUP),
    (AMPERE_AND_HOPPER, GROUPED, ("bf16",), (80,), False, GROUP),
    (AMPERE_AND_HOPPER, GROUPED[:-1], ("bf16",), USUAL, True, GROUP),
)


def variants() -> Iterator[Variant]:
    for *parts, dropout, group in LISTED:
        for target, kernel, dtype, size in product(*parts):
            few = dtype == "bf16" and size in USUAL and not dropout
            for which in ALONE if group == 1 else GROUPS if few else GROUPS[:2]:
                if ONLY.get(which, kernel) == kernel:
                    yield Variant(target, kernel, which, dtype, size, dropout, group)


@lru_cache
def kernel_of(name: str) -> tuple[PositionalEmbedding, DeviceFunctions, list[str]]:
    """Return the distance kernel in `name`, and what else is needed to compile it.

    Args:
        name: The distance kernel, alone or with other terms of attention, as in
            `kerple_log + forget_gate`.

    Returns:
        (distance kernel, its device functions, names of the input tensors of the other terms).
    """
    names = name.split(" + ")
    tempered: Any = {"log_n": {"temper_bias": True}} if "tempered_bias" in names else {}
    names = [x.replace("tempered_bias", "log_n") for x in names]
    whole = load(" + ".join(x for x in names if x != "documents") or "none", **tempered)
    pos, _ = whole.kernel_part(None, tempered=True)
    return pos, functions_of(pos)[0], [tensor for x in names for tensor in TERMS.get(x, ())]


def tile_of(variant: Variant) -> Tile:
    """Return the tile size with which training runs a variant."""
    # From `tile_sizes.TABLE`.
    itemsize, size = DTYPES[variant.dtype].itemsize, padded(variant.head_size)
    if variant.which in ("decode", "merge"):
        return few_rows(itemsize, size)
    _, functions, terms = kernel_of(variant.kernel)
    group = family(divmod(variant.target, 10))
    sizes = look_up(group, itemsize, size, functions.needs(variant.dropout, bool(terms)))
    return getattr(sizes, "query" if variant.which == "hidden" else variant.which)


def unchanged(rows: list[Row], wanted: list[Variant]) -> dict[Variant, Row]:
    """Return the rows of variants that need not be compiled again, as a dict from variant to row.

    Args:
        rows: The lines of the CSV of compiled kernels.
        wanted: The variants that are requested.
    """
    # A variant counts as compiled if `rows` has a row for it with the current Triton version and
    # tile size. Changes to the source code of the kernels are not noticed.
    written = {row.variant: row for row in rows if row.triton == triton.__version__}
    return {
        variant: row
        for variant in wanted
        if (row := written.get(variant))
        and (row.M, row.N, row.warps, row.stages) == astuple(tile_of(variant))
    }


def build(variant: Variant) -> Row:
    """Compile one variant, and return its row of the CSV."""
    # The compiler assumes that all pointers and strides are divisible by 16, as it does at run
    # time.
    tile, (pos, functions, terms) = tile_of(variant), kernel_of(variant.kernel)
    terms = [*terms, *(("position",) if functions.reads_position else ())]
    terms += ["lost"] if variant.dtype in HALF else []
    flags: Any = {"dropout": variant.dropout, "theta": pos.learnable, "terms": terms}
    fixed = constants(functions, tile, variant.head_size, **flags) | (
        {"group": 1} if variant.group == 1 else {}
    )
    function = PASSES[variant.which]
    pointers = {f"{name}_ptr": "*i32" for name in ("first", "end", "position")}
    halves = {*order(variant.which)[1], "lost"} - {"parts"}
    pointers |= {f"{name}_ptr": f"*{variant.dtype}" for name in halves}
    pointers["seed_ptr"] = "*i64"
    signature, attributes = {}, {}
    for n, name in enumerate(function.arg_names):
        if name in fixed:
            signature[name] = "constexpr"
            continue
        if name.endswith("_ptr"):
            signature[name] = pointers.get(name, "*fp32")
        else:
            signature[name] = "fp32" if name in ("scale", "rescale") else "i32"
        if name.endswith("_ptr") or re.fullmatch(r"\w+_[bht]", name):
            attributes[n,] = [["tt.divisibility", 16]]
    values = {name: value for name, value in fixed.items() if name in function.arg_names}
    options = {"num_warps": tile.warps, "num_stages": tile.stages} | OPTIONS
    source = ASTSource(function, signature, values, attributes)
    target, notes = GPUTarget("cuda", variant.target, 32), io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.compilation.always_compile = True  # a cached kernel comes without notes
        knobs.nvidia.dump_ptxas_log = True
        with contextlib.redirect_stdout(notes):
            compiled = compile_kernel(source, target=target, options=options)
    cubin, scores = compiled.asm["cubin"], tile.M * (tile.M if variant.which == "table" else tile.N)
    registers, stack = resources(cubin)
    special = round(special_functions(compiled.asm["ptx"]) * 32 * tile.warps / scores, 2)
    return Row(
        **asdict(variant), **asdict(tile), triton=triton.__version__, registers=registers,
        spilled=stack, shared=compiled.metadata.shared,
        serialised=int("serialized" in notes.getvalue()), special_functions_per_score=special,
    )  # fmt: skip


def compile_all(wanted: list[Variant], jobs: int) -> Iterator[tuple[Variant, Row]]:
    # One thread for each process: threads of torch do not survive a fork, and would be waited for.
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for variant, row in zip(wanted, pool.map(build, wanted), strict=True):
            print(f"{row.name}: {row.registers} registers, {row.spilled} spilled", flush=True)
            yield variant, row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="compile only these names")
    parser.add_argument("--changed", action="store_true", help="keep the CSV's rows of these tiles")
    parser.add_argument("--out", type=Path, default=CSV, help="CSV to write")
    jobs = entry.number(int, 1)
    parser.add_argument("--jobs", type=jobs, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--source", metavar="POS_EMB", help="print its device functions and stop")
    args = parser.parse_args()
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: no such folder as {args.out.parent}; make it first")
    if args.source:
        try:
            functions, how = functions_of(load(args.source))
        except PositionalError as error:
            parser.error(f"--source {args.source}: {error}")
        print(f"# {args.source}: {how}\n\n{functions.source}".rstrip())
        return 0
    wanted = list(variants())
    found = unchanged(read_rows(CSV), wanted) if args.changed or args.only else {}
    chosen = [variant for variant in wanted if re.search(args.only, variant.name)]
    missing = [variant for variant in chosen if not (args.changed and variant in found)]
    for variant, row in compile_all(missing, args.jobs):  # written at once: it may be stopped
        found[variant] = row
        write([found[variant] for variant in wanted if variant in found], args.out)
    rows = [found[variant] for variant in wanted if variant in found]
    print(f"{len(missing)} kernels compiled\n{summary(rows)}", file=sys.stderr)
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    entry.run(main)
