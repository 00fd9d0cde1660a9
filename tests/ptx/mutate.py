"""Test whether the emulator notices faults: break a compiled kernel in one place, and execute it.

    python tests/ptx/mutate.py [--project DIR] [--target 80] [--case k=v,...]

Barriers, waits for copies, proxy fences, and guards of loads and stores are removed one by one. The
last column of the output shows how the fault was noticed: by a finding, or by other results.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

import torch

from tests.ptx import project, verify
from tests.ptx.emulator import driver

KINDS = {
    "barrier": r"^\s*bar\.sync",
    "wait for copies": r"^\s*cp\.async\.wait_(group|all)",
    "proxy fence": r"^\s*fence\.proxy",
    "wgmma wait": r"^\s*wgmma\.wait_group",
    "guard": r"^\s*@!?%p\d+ (ld\.global|st\.global|st\.shared)",
    "zero fill": r"^\s*cp\.async\.c[ag]\.shared\.global .*, %r\d+;",
}


def mutants(text: str) -> Iterator[tuple[str, int, str, str]]:
    """Yield (kind of fault, line number, line, the broken text) for each place to break."""
    lines = text.split("\n")
    for n, line in enumerate(lines):
        for kind, pattern in KINDS.items():
            if re.match(pattern, line):
                new = "\t;"
                if kind == "guard":
                    new = re.sub(r"^\s*@!?%p\d+ ", "\t", line)
                elif kind == "zero fill":
                    new = re.sub(r", %r\d+;", ";", line)
                elif (
                    re.search(r"\d+\s*;", line) and "wait" in kind
                ):  # one more group may be in flight
                    new = re.sub(r"(\d+)\s*;", lambda m: f"{int(m[1]) + 1};", line)
                yield kind, n + 1, line.strip(), "\n".join(lines[:n] + [new] + lines[n + 1 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    project.add_option(parser)
    parser.add_argument("--target", type=int, default=80)
    parser.add_argument("--case", default="kind=kerple_log,dtype=bf16,E=64,H=1,T=200")
    parser.add_argument("--most", type=int, default=8, help="mutants of a kind and pass")
    args = parser.parse_args()
    project.use(args.project)
    driver.install(args.target)
    launches, original = [], driver.execute

    def tensors_of(arguments) -> dict[int, torch.Tensor]:
        return {x.data_ptr(): x for _, x in arguments if isinstance(x, torch.Tensor)}

    def stored(arguments) -> dict[int, object]:
        tensors = tensors_of(arguments)
        return {key: driver.storage_bytes(x).copy() for key, x in tensors.items()}

    def record(ptx, grid, arguments, shared, name):
        before = stored(arguments)
        original(ptx, grid, arguments, shared, name)
        launches.append((ptx, grid, arguments, shared, name, before, stored(arguments)))

    driver.execute = record
    verify.run(verify.Case.read(args.case))
    total = noticed = 0
    for ptx, grid, arguments, shared, name, before, after in launches:
        tensors, seen = tensors_of(arguments), dict.fromkeys(KINDS, 0)
        for kind, line, text, changed in mutants(ptx):
            seen[kind] += 1
            if seen[kind] > args.most:
                continue
            for key, x in tensors.items():
                driver.storage_bytes(x)[:] = before[key]
            driver.LOG.clear()
            try:
                original(changed, grid, arguments, shared, name)
                found = [x for x in verify.findings() if "note:" not in x]
                differs = any(
                    (driver.storage_bytes(x) != after[key]).any() for key, x in tensors.items()
                )
                what = found[0] if found else "results changed" if differs else "NOTHING"
            except Exception as error:  # a broken kernel may fail in any way
                what = f"stopped: {error}"
            total, noticed = total + 1, noticed + (what != "NOTHING")
            print(f"{name:13} {kind:16} line {line:5} {text[:60]:60} -> {what[:70]}", flush=True)
        for key, x in tensors.items():
            driver.storage_bytes(x)[:] = after[key]
    print(f"{noticed} of {total} noticed")


if __name__ == "__main__":
    main()
