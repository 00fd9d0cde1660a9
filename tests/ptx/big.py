"""Repeat launches as if their tensors were enormous, to find offsets that overflow 32 bits.

    python tests/ptx/big.py [--project DIR] [--target 80] [--extra N]

The emulator runs each launch a second time, as if `extra` other sequences came first in the batch:
program numbers are higher, and base addresses are lower by the size of these sequences. The
programs should then access the same memory and give the same bits. If an offset is computed in 32
bits, it overflows, and the access lies outside the tensors.
"""

from __future__ import annotations

import argparse

import torch

from tests.ptx import project, verify
from tests.ptx.emulator import driver
from tests.ptx.emulator.memory import Findings, Global


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    project.add_option(parser)
    parser.add_argument("--target", type=int, default=80)
    parser.add_argument("--extra", type=int, default=100_000_000, help="earlier sequences")
    parser.add_argument("--kinds", default="kerple_log,rpe")
    args = parser.parse_args()
    project.use(args.project)
    driver.install(args.target)
    original = driver.execute

    def execute(ptx, grid, arguments, shared, name):
        tensors = {n: x for n, x in arguments if isinstance(x, torch.Tensor)}
        before = {n: driver.storage_bytes(x).copy() for n, x in tensors.items()}
        original(ptx, grid, arguments, shared, name)
        first, same, found = again(ptx, grid, dict(arguments), shared, name, before)
        result = "the same bits" if same else "DIFFERENT"
        print(f"sm_{args.target} {name}: programs {first} ... {first + grid[0] - 1}, ", end="")
        print(f"{result}; {found or 'no findings'}", flush=True)

    def again(ptx, grid, values, shared, name, before):
        """Run the second launch; return (number of its first program, same results?, findings)."""
        kernel, run, _ = driver.built(ptx)
        heads, batch = values["heads"], values["q_ptr"].shape[0]
        # A group of 1 is compiled in, and then it is no argument.
        items = heads // values.get("group", 1) if name == "key_pass" else heads
        first = args.extra * (grid[0] // batch)
        assert grid[0] % (batch * items) == 0
        if first + grid[0] >= 1 << 31:
            raise SystemExit("choose fewer extra sequences")
        memory, findings, found, words = Global(), Findings(), {}, []
        for label, value in values.items():
            if isinstance(value, torch.Tensor):
                key = value.untyped_storage().data_ptr()
                if key not in found:
                    found[key] = (memory.add(before[label], label), value)
                place = value.storage_offset() * value.element_size()
                value = found[key][0] + place - distance(label, values, batch)
            words.append(value)
        memory.freeze()
        driver.run_programs(kernel, run, words, memory, findings, shared, grid, first)
        pairs = [(at, driver.storage_bytes(x)) for at, x in found.values()]
        same = all((memory.back(at, data.size) == data).all() for at, data in pairs)
        return first, same, findings.lines()

    def distance(label: str, values: dict, batch: int) -> int:
        """Return the bytes that the extra sequences would need in the tensor `label`."""
        x, name = values[label], label.removesuffix("_ptr")
        if x.dim() == 4 and name != "sums":
            step = values.get(f"{name}_b", 1)  # a stride of 1 is compiled in
        elif name in ("lse", "delta", "sums"):
            step = x.numel() // batch
        else:
            step = 0
        return args.extra * step * x.element_size()

    driver.execute = execute
    for kind in args.kinds.split(","):
        verify.run(verify.Case(kind, "bf16", 64, 2, 2, 1, 100, 130))


if __name__ == "__main__":
    main()
