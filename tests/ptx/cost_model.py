"""Estimate from machine code (SASS) how many clocks a GPU needs per attention score.

    python tests/ptx/cost_model.py [--project DIR] [--target 90] [--kernels kerple_log,none]
    python tests/ptx/cost_model.py --passes query --sizes 128 --tile 128x32x8x2    # another tile

The tool counts the instructions per score in the inner loops of the compiled Triton kernels. In one
clock, an SM of an H100 can issue 4 warp instructions. It can execute 128 FFMA/FMUL/FADD, 64
operations of the ALU (integer, logic, select, min/max, conversions), 16 special functions, and 2048
dense bf16 multiply-adds (989 TFLOP/s at 1.83 GHz). An A100 executes 64 FFMA and 1024 multiply-adds.

Shared memory delivers 128 bytes in a clock. All reads and writes count, without bank conflicts:
loads, stores, copies from global memory, exchanges between threads (SHFL), and the operands of
Hopper's products that are not in registers. A product m64nNk16 of one warp group reads 16 N numbers
of its second operand, and 16 * 64 of the first one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from unittest import mock

import triton

from tests.ptx import project

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

MUFU = ("MUFU",)
FMA = ("FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2")
IMAD = ("IMAD",)
MEMORY = (
    "LDS",
    "STS",
    "LDSM",
    "STSM",
    "LDG",
    "STG",
    "LDGSTS",
    "ATOMS",
    "SHFL",
    "LDL",
    "STL",
    "LDC",
    "LDGDEPBAR",
    "BAR",
    "DEPBAR",
)
TENSOR = ("HGMMA", "HMMA")
BANDWIDTH = 128
"""The bytes that an SM reads from or writes to shared memory in a clock."""
FASTEST = {80: {"tensor": 1024, "fma": 64}, 90: {"tensor": 2048, "fma": 128}}
"""The operations that the units of an SM execute in a clock, by GPU."""
UNIFORM = ("R2UR", "S2UR")


def classify(op: str) -> str:
    """Return the name of the unit that executes an opcode."""
    head = op.split(".")[0]
    if head in MUFU:
        return "mufu"
    if head in FMA:
        return "fma"
    if head in IMAD:
        return "imad"
    if head in TENSOR:
        return "tensor"
    if head in MEMORY:
        return "memory"
    if head.startswith("U") and head not in ("UNDEF",) or head in UNIFORM:
        return "uniform"
    if head in (
        "BRA",
        "WARPSYNC",
        "WARPGROUP",
        "NOP",
        "BSSY",
        "BSYNC",
        "EXIT",
        "CALL",
        "RET",
        "YIELD",
    ):
        return "control"
    return "alu"


def shared_bytes(op: str, text: str) -> float:
    """Return the bytes of shared memory that an instruction of one warp reads or writes."""
    head = op.split(".")[0]
    if head == "HGMMA":  # four warps execute one product
        M, N, K = (int(x) for x in re.search(r"\.(\d+)x(\d+)x(\d+)", op).groups())
        first = 0 if re.search(r"R\d+, R\d+, gdesc", text) else M * K
        return 2 * (first + N * K) / 4
    if head in ("LDSM", "STSM"):  # matrices of 8 x 8 numbers of 16 bits
        return 128 * int(op.rpartition(".")[2] if op[-1].isdigit() else 1)
    if head in ("LDS", "STS", "LDGSTS", "ATOMS", "SHFL"):
        width = re.search(r"\.(?:U|S)?(8|16|64|128)\b(?!B)", op)
        return 32 * (int(width[1]) // 8 if width else 4)
    return 0.0


def loops(sass: str):
    """Return the innermost loops, each as a list of (opcode, text of the instruction)."""
    code, labels = [], {}
    for line in sass.splitlines():
        found = re.match(r"\s*(\.L_x_\d+):", line)
        if found:
            labels[found[1]] = len(code)
            continue
        found = re.match(r"\s*/\*([0-9a-f]{4,5})\*/\s+(.*?);", line)
        if found:
            code.append((int(found[1], 16), found[2].strip()))
    where = {address: n for n, (address, _) in enumerate(code)}
    out = []
    for n, (_, text) in enumerate(code):
        jump = re.search(r"\bBRA\b.*?(?:`\((\.L_x_\d+)\)|0x([0-9a-f]+))", text)
        if not jump:
            continue
        target = labels.get(jump[1]) if jump[1] else where.get(int(jump[2], 16))
        if target is not None and target < n:
            out.append((target, n))
    inner = [x for x in out if not any(y != x and y[0] >= x[0] and y[1] <= x[1] for y in out)]
    return [[strip(code[i][1]) for i in range(a, b + 1)] for a, b in inner]


def strip(text: str) -> tuple[str, str]:
    """Return (opcode without a predicate, text of the instruction)."""
    words = text.split()
    if words[0].startswith("@"):
        words = words[1:]
    return words[0], text


def disassemble(cubin: bytes) -> str:
    """Return the SASS of a binary. Triton's nvdisasm is used if it exists, otherwise cuobjdump."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        for tool, flag in (("nvdisasm", "-c"), ("cuobjdump", "-sass")):
            if (path := BINARIES / tool).exists():
                env = os.environ | {"PATH": f"{BINARIES}:{os.environ['PATH']}"}
                command = [path, flag, file.name]
                done = subprocess.run(command, capture_output=True, text=True, env=env)
                if done.returncode == 0:
                    return done.stdout
    raise SystemExit("neither nvdisasm nor cuobjdump disassembles")


def named(tool, text, target, dtype):
    """Return (variant, tile or None) for POS_EMB:PASS:HEAD SIZE[:TILE], as serial.py describes."""
    kernel, which, size, *tile = text.split(":")
    chosen = tool.Tile(*map(int, tile[0].split("x"))) if tile else None
    return tool.Variant(target, kernel, which, dtype, int(size)), chosen


def build(tool, variant, tile=None):
    """Compile a variant; return (row of tools/compile_kernels.py, Triton's compiled kernel).

    `tile` replaces the tile that the project chooses.
    """
    kept, compile_kernel = {}, tool.compile_kernel

    def keep(*arguments, **options):
        kept["compiled"] = compile_kernel(*arguments, **options)
        return kept["compiled"]

    patches = [mock.patch.object(tool, "compile_kernel", keep)]
    if tile:
        patches.append(mock.patch.object(tool, "tile_of", lambda _: tile))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        row = tool.build(variant)
    return row, kept["compiled"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    project.add_option(parser)
    parser.add_argument("--target", type=int, default=90)
    parser.add_argument("--kernels", default="kerple_log,none")
    parser.add_argument("--sizes", default="64,128")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--passes", default="forward,query,key")
    parser.add_argument("--group", type=int, default=1, help="query heads of each key head")
    parser.add_argument("--tile", help="MxNxWARPSxSTAGES, instead of the project's tile")
    parser.add_argument("--dump", type=Path, help="folder for SASS and PTX")
    args = parser.parse_args()
    project.use(args.project)
    from tools import compile_kernels as tool

    tile = tool.Tile(*map(int, args.tile.split("x"))) if args.tile else None
    names = product(args.sizes.split(","), args.passes.split(","), args.kernels.split(","))
    for size, which, kernel in names:
        variant = {"target": args.target, "kernel": kernel, "which": which}
        variant |= {"dtype": args.dtype, "head_size": int(size), "group": args.group}
        row, compiled = build(tool, tool.Variant(**variant), tile)
        sass = disassemble(compiled.asm["cubin"])
        if args.dump:
            stem = args.dump / f"sm{args.target}_{kernel}_{which}_{args.dtype}_{size}"
            stem.with_suffix(".sass").write_text(sass)
            stem.with_suffix(".ptx").write_text(compiled.asm["ptx"])
        report(kernel, which, int(size), row, sass, FASTEST[80 if args.target < 90 else 90])


def report(kernel, which, size, row, sass, fastest) -> None:
    """Print the instructions and clocks per score of the unmasked and of the masked loop."""
    threads, scores = 32 * row.warps, row.M * row.N
    found = []
    for loop in loops(sass):
        ops = [op for op, _ in loop]
        if not any(op.split(".")[0] in TENSOR for op in ops):
            continue
        count = Counter(classify(op) for op in ops)
        found.append((count, Counter(op.split(".")[0] for op in ops), loop))
    if not found:
        print(kernel, which, size, "no loop with products found")
        return
    # The unmasked loop has the fewest instructions outside the tensor cores.
    found.sort(key=lambda x: sum(x[0].values()))
    products = {"forward": 2, "query": 3, "key": 4, "table": 2, "decode": 2}[which]
    P = 1 << (size - 1).bit_length()
    for name, (count, ops, loop) in (("unmasked", found[0]), ("masked", found[-1])):
        waits = sum("WARPGROUP.DEPBAR" in text for _, text in loop)
        per = {k: v * threads / scores for k, v in count.items()}
        total = sum(count.values()) * threads / scores
        moved = sum(shared_bytes(*each) for each in loop) * row.warps / scores
        clocks = {
            "tensor": products * P / fastest["tensor"],
            "mufu": per.get("mufu", 0) / 16,
            "fma": (per.get("fma", 0) + 2 * per.get("imad", 0)) / fastest["fma"],
            "alu": per.get("alu", 0) / 64,
            "issue": total / 128,
            "shared": moved / BANDWIDTH,
        }
        others = max(v for k, v in clocks.items() if k not in ("tensor", "shared"))
        one_by_one = max(clocks["tensor"], clocks["shared"]) + others
        text = " ".join(f"{k} {v:.2f}" for k, v in sorted(per.items()))
        used = f"{row.M}x{row.N} warps {row.warps} regs {row.registers} stack {row.spilled}"
        print(f"{kernel:12} {which:8} {size:4} {name:8} {used} shared {row.shared}", end="")
        print(f" | per score: {text} total {total:.2f}; {moved:.0f} bytes in shared memory", end="")
        print(f"; waits for HGMMA {waits} of {ops['HGMMA']}")
        print("    mclk/score/SM:", *(f"{k} {1000 * v:.0f}" for k, v in clocks.items()), end="")
        print(f" | overlapped {1000 * max(clocks.values()):.0f}, ", end="")
        print(f"one after the other {1000 * one_by_one:.0f}", flush=True)


if __name__ == "__main__":
    main()
