"""Read the registers, spills and special functions from the machine code of compiled kernels."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

SPECIAL = re.compile(r"\s(ex2|lg2|rcp|sqrt|rsqrt|sin|cos|tanh|div)\.(approx|full|rn)")
"""PTX instructions that a GPU computes in its unit for special functions."""


def resources(cubin: bytes) -> tuple[int, int]:
    """Return the resources of each thread of a compiled kernel: (registers, bytes of stack).

    The stack contains only spilled registers.

    Args:
        cubin: The machine code of the kernel.
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


def special_functions(ptx: str) -> int:
    """Count the special functions (such as log2) that a thread computes in one loop iteration.

    Of all loops, the loop with the most special functions counts.

    Args:
        ptx: The kernel as PTX text.
    """
    # The result is the largest of all loops. Of nested loops, only the innermost loop that contains
    # special functions is counted.
    labels, costs, lines = {}, {}, ptx.splitlines()
    for n, line in enumerate(lines):
        if label := re.match(r"(\$L__BB\w+):", line):
            labels[label[1]] = n
        jump = re.search(r"\bbra\S*\s+(\$L__BB\w+);", line)
        if jump and jump[1] in labels:
            loop = range(labels[jump[1]], n)
            costs[loop] = sum(bool(SPECIAL.search(lines[n])) for n in loop)
    costs = {loop: cost for loop, cost in costs.items() if cost}
    inner = [x for x in costs if not any(y != x and y[0] >= x[0] and y[-1] <= x[-1] for y in costs)]
    return max((costs[x] for x in inner), default=0)
