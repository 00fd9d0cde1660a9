"""Check that no instruction touches registers that an asynchronous matrix product still uses.

    python tests/ptx/hazards.py FILE.ptx ...

Between wgmma and its wait_group, no instruction may read or write the accumulators, or write the
registers of the operand A. The check is a dataflow analysis over the control-flow graph. Its state
is the list of the groups in flight, each a pair (accumulator registers, registers of A).
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.ptx.emulator.parser import parse


def registers(operand, out):
    if operand[0] == "reg":
        out.add(operand[1])
    elif operand[0] in ("vec",):
        for x in operand[1]:
            registers(x, out)
    elif operand[0] in ("mem", "not"):
        registers(operand[1], out)
    elif operand[0] == "pair":
        registers(operand[1], out)
        registers(operand[2], out)
    return out


def touched(ins):
    """Return the sets of registers that an instruction (writes, reads)."""
    first = ins.op.split(".")[0]
    stores = first in ("st", "bar", "barrier", "cp", "stmatrix", "bra", "ret", "fence")
    written = set() if stores or not ins.args else registers(ins.args[0], set())
    read = set()
    for x in ins.args if stores else ins.args[1:]:
        registers(x, read)
    if ins.guard:
        read.add(ins.guard.lstrip("!"))
    return written, read


def check(text):
    """Check a PTX text; return (line -> hazard, the largest number of groups in flight)."""
    kernel = parse(text)
    labels = {b.label: n for n, b in enumerate(kernel.blocks)}
    found, seen, work, deepest = {}, set(), [(0, ((frozenset(), frozenset()),))], 0
    while work:
        n, state = work.pop()
        if (n, state) in seen or n >= len(kernel.blocks):
            continue
        seen.add((n, state))
        groups = [list(g) for g in state]
        targets, fall = [], True
        for ins in kernel.blocks[n].body:
            first = ins.op.split(".")[0]
            if first == "wgmma":
                advance(ins, groups, found)
                deepest = max(deepest, len(groups) - 1)
                continue
            written, read = touched(ins)
            for acc, a in groups:
                bad = ((written | read) & acc) | (written & a)
                if bad:
                    found[ins.line] = f"{ins.text[:80]} touches {sorted(bad)[:4]}"
            if first == "bra":
                targets.append(labels[ins.args[0][1]])
                fall = ins.guard is not None
            elif first in ("ret", "exit"):
                fall = False
        after = tuple((frozenset(a), frozenset(b)) for a, b in groups)
        if fall:
            targets.append(n + 1)
        work += [(t, after) for t in targets]
    return found, deepest


def advance(ins, groups, found) -> None:
    """Update the list of groups in flight for a wgmma instruction.

    The last group in the list is the one that is not yet committed.
    """
    if "mma_async" in ins.op:
        acc = registers(ins.args[0], set())
        a = registers(ins.args[1], set()) if ins.args[1][0] == "vec" else set()
        clash = a & set().union(*(g[0] for g in groups))
        if clash:
            found[ins.line] = f"A is an accumulator in flight: {sorted(clash)[:3]}"
        groups[-1] = [groups[-1][0] | acc, groups[-1][1] | a]
    elif "commit" in ins.op:
        groups.append([frozenset(), frozenset()])
    elif "wait_group" in ins.op:
        del groups[: max(0, len(groups) - 1 - ins.args[0][1])]


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        hazards, deepest = check(path.read_text())
        print(f"{path.name} groups in flight at most {deepest}; {len(hazards)} hazards", end=" ")
        print(list(hazards.items())[:3])
