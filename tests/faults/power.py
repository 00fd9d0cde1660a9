"""Rebuild what a disk may hold after a power loss, give the command again, and judge the result.

A loss is modelled before every rename, deletion and fsync of a traced command, in the three ways
of `disk.py`. States with equal content are tried once.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator

from tests.faults.case import Case
from tests.faults.disk import LOSSES, Disk, State, write_state
from tests.faults.trace import ALSO, KINDS, Call, read_trace, run_traced


def recorded(case: Case) -> tuple[list[Call], int]:
    """Run the command, and return its calls with all that it wrote, and its process id."""
    trace = case.folder / "trace"
    case.reset()
    done = run_traced(
        case.command, trace, ["-xx", "-s", str(1 << 26), "-e", f"trace={','.join(KINDS + ALSO)}"]
    )
    assert done.code == 0, done.text
    return list(read_trace(trace)), done.pid


def states(case: Case, calls: list[Call], seed: int) -> Iterator[tuple[str, State, int]]:
    """Yield a name, what a power loss leaves there, and the number of the next call."""
    final = Disk(case.now)  # only for its root
    case.reset()
    disk, dice = Disk(case.now), random.Random(seed)
    for number, call in disk.replay(calls):
        place = ", ".join(each.removeprefix(f"{case.now}/") for each in call.paths)
        for loss in LOSSES:
            yield f"{loss} before {call.kind} {place}", disk.after(loss, dice), number
    for loss in LOSSES:
        yield f"{loss} at the end", disk.after(loss, dice), len(calls)
    model, real = disk.now(), final.now()
    wrong = [name for name in model.keys() | real.keys() if model.get(name) != real.get(name)]
    assert not wrong, f"the replayed calls do not give the real folder: {wrong}"


def holds(found: object, expected: object) -> bool:
    """Return whether the result `found` is `expected`, or has more files, such as a journal."""
    if isinstance(found, dict) and isinstance(expected, dict):
        return expected.items() <= found.items()
    return found == expected


def digest_of(state: State) -> str:
    hasher = hashlib.sha256()
    for name, content in sorted(state.items()):
        hasher.update(f"{name} {None if content is None else len(content)}\n".encode())
        hasher.update(content or b"")
    return hasher.hexdigest()


def lose(
    case: Case, seed: int, most: int, say: Callable[[str], None], only: str = ""
) -> Iterator[str]:
    """Give the command again after each power loss. Yield the faults found."""
    calls, pid = recorded(case)
    expected = case.result(case.now)
    found: dict[str, tuple[str, State, int]] = {}
    count = 0
    for name, state, number in states(case, calls, seed):
        key = digest_of(state) + str(number == len(calls))
        found.setdefault(key, (name.replace(str(pid), "PID"), state, number))
        count += 1
    tried = [each for each in found.values() if re.search(only, each[0])]
    if len(tried) > most:
        dice = random.Random(seed)
        tried = [tried[i] for i in sorted(dice.sample(range(len(tried)), most))]
    say(f"{count} losses with {len(found)} different states, of which {len(tried)} are tried")
    for name, state, number in tried:
        write_state(state, case.now)
        problem = ""
        try:
            case.survives(case.now, calls[:number])
            if number == len(calls):
                assert holds(case.result(case.now), expected), (
                    "what the command had written is gone"
                )
            done = run_traced(case.command, None)
            if "Traceback" in done.text:
                problem = f"a traceback: {done.text[-3000:]}"
            elif done.code and not case.may_refuse(done.text, case.now):
                problem = f"the command failed: {done.text[-3000:]}"
            elif not done.code and case.result(case.now) != expected:
                problem = f"another result; the command said:\n{done.text[-1500:]}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        say(f"{name}: {'FAULT' if problem else 'the result is that of a run without a loss'}")
        if problem:
            yield f"{name}: {problem}"
