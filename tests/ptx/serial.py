"""Report for which sm_90 kernels ptxas serialises matrix products, with registers and spills.

    python tests/ptx/serial.py [--project DIR] kerple_log:forward:64:128x64x8x3 ...

ptxas reports serialisation in its notes C7510 ... C7519. An argument is DISTANCE_KERNEL:PASS:HEAD
SIZE:TILE, where TILE is M x N x warps x stages. Without a TILE, the committed one is compiled.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from tests.ptx import cost_model, project


def notes_of(ptx: str) -> str:
    """Return the messages that ptxas prints when it compiles a PTX text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [
            cost_model.BINARIES / "ptxas",
            "-v",
            "--gpu-name=sm_90a",
            path,
            "-o",
            f"{path}.cubin",
        ]
        return subprocess.run(command, capture_output=True, text=True).stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    project.add_option(parser)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--sass", action="store_true", help="also what cost_model.py prints")
    parser.add_argument("what", nargs="+", metavar="POS_EMB:PASS:SIZE[:TILE]")
    args = parser.parse_args()
    project.use(args.project)
    from tools import compile_kernels as tool

    for text in args.what:
        variant, tile = cost_model.named(tool, text, 90, args.dtype)
        try:
            row, compiled = cost_model.build(tool, variant, tile)
        except Exception as error:  # the compiler's: the other variants are still compiled
            print(text, "failed:", str(error)[:100])
            continue
        notes = notes_of(compiled.asm["ptx"])
        codes = sorted(set(re.findall(r"\(C\d+\)", notes)))
        serial = "SERIAL" if "serialized" in notes else "ok    "
        used = f"regs {row.registers} stack {row.spilled} shared {row.shared}"
        shape = f"{row.M}x{row.N}x{row.warps}x{row.stages}"
        print(f"{serial} {text} tile {shape} {used} {codes}", flush=True)
        if args.sass:
            sass = cost_model.disassemble(compiled.asm["cubin"])
            cost_model.report(variant.kernel, variant.which, variant.head_size, row, sass)


if __name__ == "__main__":
    main()
