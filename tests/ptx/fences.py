"""Name the Blackwell matrix products that may read copied data before a fence.

    python -m tests.ptx.fences kerple_log:query:64 kerple_log:query:64:64x32x4x3 ...

On sm_100, cp.async writes shared memory through the generic proxy, and tcgen05.mma reads it through
the async proxy. Between a wait for copies and a product that reads them, PTX requires a
fence.proxy.async. The check follows every path through the code, and does not know which data a
product reads, so it may name a product that reads older data. An argument is as in serial.py.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field

from tests.ptx import cost_model, project


@dataclass
class Block:
    """A part of the code between two labels.

    Attributes:
        steps: The line number and the kind of each instruction of interest.
        goes_to: The labels of the blocks that may follow.
    """

    steps: list[tuple[int, str]] = field(default_factory=list)
    goes_to: set[str] = field(default_factory=set)


KINDS = {"wait": "cp.async.wait", "fence": "fence.proxy.async", "product": "tcgen05.mma"}


def blocks_of(ptx: str) -> dict[str, Block]:
    """Return the blocks of a kernel's PTX, by label. The first one has the label "entry"."""
    block, blocks, falls = Block(), {}, True
    blocks["entry"] = block
    for number, line in enumerate(ptx.splitlines(), 1):
        text = line.split("//")[0].strip()
        if label := re.match(r"(\$L__BB\w+):", text):
            if falls:
                block.goes_to.add(label[1])
            block = blocks[label[1]] = Block()
            falls = True
        elif jump := re.match(r"(@!?%p\d+ )?bra(?:\.uni)?\s+(\$L__BB\w+);", text):
            block.goes_to.add(jump[2])
            if jump[1]:  # the rest is a block of its own, which a jump may skip
                block.goes_to.add(after := f"{number}")
                block = blocks[after] = Block()
            else:
                falls = False
        else:
            block.steps += [(number, kind) for kind, name in KINDS.items() if name in text]
            falls = falls and not re.match(r"(ret|exit|trap);", text)
    return blocks


def unfenced(ptx: str) -> list[int]:
    """Return the lines of the products that a path reaches after a wait without a fence."""
    blocks, found = blocks_of(ptx), set()
    left, seen = [("entry", False)], set()
    while left:
        label, waited = left.pop()
        if (label, waited) in seen:
            continue
        seen.add((label, waited))
        for number, kind in blocks[label].steps:
            if kind == "product" and waited:
                found.add(number)
            waited = kind == "wait" or (waited and kind != "fence")
        left += [(each, waited) for each in blocks[label].goes_to]
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    project.add_option(parser)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("what", nargs="+", metavar="POS_EMB:PASS:SIZE[:TILE]")
    args = parser.parse_args()
    project.use(args.project)
    from tools import compile_kernels as tool

    for text in args.what:
        row, compiled = cost_model.build(tool, *cost_model.named(tool, text, 100, args.dtype))
        lines = unfenced(compiled.asm["ptx"])
        used = f"regs {row.registers} spilled {row.spilled} shared {row.shared} {lines}"
        shape, state = f"{row.M}x{row.N}x{row.warps}x{row.stages}", "UNFENCED" if lines else "ok"
        print(f"{state:<8} {text} tile {shape} {used}", flush=True)


if __name__ == "__main__":
    main()
