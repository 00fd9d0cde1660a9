"""Fail the system calls of a command, one in each run, and judge how the command ends.

The calls to fail are those of a trace without faults that change or flush a file of the case's
folder. They are grouped by kind and path. Of a group with more than three calls, the first, the
last and one drawn from the seed are failed.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.faults.case import Case
from tests.faults.trace import KINDS, Call, Done, counted, read_trace, run_traced

INTERRUPTIBLE = {"openat", "write", "writev", "pwrite64", "fsync", "fdatasync", "ftruncate"}
"""The calls that can fail with EINTR, by their manual pages."""
NO_SPACE = {"unlink", "unlinkat", "rmdir", "ftruncate"}
"""The calls that free space. They do not fail with ENOSPC."""
ATTEMPTS = 3
HARMLESS = {
    r"\.lease-\d+$": "a lease that stays: the next job sees that its process has ended",
    r" sendfile$": "Python copies the file by read and write instead",
    r"\.unfinished-global_step\d+(/\S+)? (unlinkat|rmdir)$": (
        "the rest of a removed checkpoint: the next start removes it"
    ),
    r"\.unfinished(/new-\w+)? rmdir$": "an empty folder: the next writer removes it",
    r"/log\.txt (write|openat)$": "a line of a cell's output is lost, and nothing else",
}
"""Pattern of PATH KIND -> why a command may pass the fault over in silence."""


@dataclass(frozen=True)
class Target:
    """A call to fail: number `number` of its kind and thread, among those that `path` selects.

    In the paths, PID stands for the id of the command's process.
    """

    kind: str
    path: str
    place: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.place} #{self.number}"


@dataclass(frozen=True)
class Verdict:
    """How a trial ended: `well`, with an error or `in silence`; `fault` says what is wrong."""

    ended: str
    fault: str = ""


def without_pid(text: str, pid: int) -> str:
    return re.sub(rf"(?<!\d){pid}(?!\d)", "PID", text)


def targets(calls: list[Call], pid: int, folder: Path) -> dict[tuple[str, str], list[Target]]:
    """Return the calls that change files of `folder`, grouped by kind and path."""
    groups: dict[tuple[str, str], list[Target]] = defaultdict(list)
    for call, chosen, number in counted(calls):
        inside = [each for each in call.paths if Path(each).is_relative_to(folder)]
        if not call.writes or not inside or call.kind == "mkdir" and call.result:
            continue
        if re.fullmatch(r"#\d+", Path(inside[0]).name):
            continue  # a temporary file without a name: no path selects it, and nothing of it stays
        place = without_pid(str(Path(inside[0]).relative_to(folder)), pid)
        groups[call.kind, place].append(Target(call.kind, without_pid(chosen, pid), place, number))
    return groups


def chosen(groups: dict[tuple[str, str], list[Target]], dice: random.Random) -> list[Target]:
    """Return the calls to fail of each group (see the module docstring)."""
    found = []
    for group in groups.values():
        group = list(dict.fromkeys(group))
        few = group if len(group) <= 3 else [group[0], dice.choice(group[1:-1]), group[-1]]
        found += few
    return found


def errors_of(kind: str, wanted: list[str]) -> list[str]:
    """Return those of the errors `wanted` with which a call of this kind can fail."""
    return [
        each for each in wanted
        if (each != "EINTR" or kind in INTERRUPTIBLE) and (each != "ENOSPC" or kind not in NO_SPACE)
    ]  # fmt: skip


def fail(case: Case, target: Target, error: str, trace: Path) -> Done | None:
    """Run the command with one call failing; None if it did not reach this call."""
    kinds = ",".join(KINDS)
    inject = f"inject={target.kind}:error={error}:when={target.number}"
    options = ["-e", f"trace={kinds}", "-P", target.path.replace("PID", "{pid}"), "-e", inject]
    for _ in range(ATTEMPTS):
        case.reset()
        done = run_traced(case.command, trace, options)
        if any(call.injected and call.kind == target.kind for call in read_trace(trace)):
            return done
    return None


def judge(case: Case, target: Target, error: str, done: Done, expected: object) -> Verdict:
    """Return how the command dealt with the fault (see `Case`)."""
    # The commands that a sweep runs write what they say into these files.
    logs = "".join(path.read_text(errors="replace") for path in case.now.rglob("log.txt"))
    if "Traceback (most recent call last)" in (text := logs + done.text):
        return Verdict("with a traceback", text[-3000:])
    try:
        if done.code == 0:
            if case.result(case.now) != expected:
                return Verdict("well", "the result is not that of a run without a fault")
            said = re.search(r"cannot be|could not|not written|No space|Input/output", text)
            excused = any(re.search(each, f"{target.place} {target.kind}") for each in HARMLESS)
            if said:
                return Verdict("well, with a warning")
            if error == "EINTR":
                return Verdict("well: the call was repeated")
            if excused:
                return Verdict("well, in silence")
            return Verdict("well, in silence", "the command did not say that a call failed")
        case.whole(case.now)
        lines = done.text.strip().splitlines()
        last = next((line for line in lines if "error: " in line or "FAILED" in line), "")
        if not last:
            return Verdict("with no error message", done.text[-3000:])
        if str(case.now) not in done.text[done.text.index(last) :]:
            return Verdict("with an error that names no file", last)
        again = run_traced(case.command, None)
        if again.code and not case.may_refuse(again.text, case.now):
            return Verdict("with an error", f"the command again: {again.text[-3000:]}")
        if not again.code and case.result(case.now) != expected:
            return Verdict("with an error", "the command again has another result")
    except Exception as problem:
        return Verdict(f"code {done.code}", f"{type(problem).__name__}: {problem}")
    return Verdict("with its error")


def hurt(
    case: Case, errors: list[str], seed: int, most: int, say: Callable[[str], None],
    only: str = "", done_before: frozenset[str] = frozenset(),
) -> Iterator[str]:  # fmt: skip
    """Fail calls of the command, and say for each how it ended. Yield the faults found."""
    trace = case.folder / "trace"
    case.reset()
    run_traced(case.command, None)
    expected = case.result(case.now)
    case.reset()
    whole = run_traced(case.command, trace, ["-e", f"trace={','.join(KINDS)}"])
    assert whole.code == 0, whole.text
    assert case.result(case.now) == expected, "two runs without a fault have different results"
    groups = targets(list(read_trace(trace)), whole.pid, case.now)
    dice = random.Random(seed)
    trials = [(t, e) for t in chosen(groups, dice) for e in errors_of(t.kind, errors)]
    trials = [each for each in trials if re.search(only, str(each[0]))]
    count = len(trials)
    if len(trials) > most:
        trials = [trials[i] for i in sorted(dice.sample(range(len(trials)), most))]
    calls = sum(map(len, groups.values()))
    say(f"{calls} calls in {len(groups)} groups; {count} trials of which {len(trials)} are run")
    for target, error in trials:
        name = f"{error} {target}"
        if name in done_before:
            continue
        done = fail(case, target, error, trace)
        if done is None:
            say(f"{name}: NOT REACHED in {ATTEMPTS} runs")
            continue
        verdict = judge(case, target, error, done, expected)
        say(f"{name}: {'FAULT, ' if verdict.fault else ''}ended {verdict.ended}")
        if verdict.fault:
            yield f"{name}: ended {verdict.ended}: {verdict.fault}"
