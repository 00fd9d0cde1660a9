"""A sample of failed system calls and of power losses (`python -m tests.faults.search`)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults import inject, power
from tests.faults.all_cases import CASES, POWER
from tests.faults.case import Case, file_hashes
from tests.faults.disk import LOSSES, Disk
from tests.faults.trace import KINDS, NEEDED, installed, read_trace, run_traced

pytestmark = pytest.mark.skipif(not installed(), reason=NEEDED)

# Writes its first argument into the file that its second argument names, in one of several ways.
WRITER = """
import os, sys
text, path, how = sys.argv[1:]
try:
    with open(path + ".new", "w") as file:
        file.write(text)
        file.flush()
        if how == "flushed":
            os.fsync(file.fileno())
    os.rename(path + ".new", path)
except OSError as error:
    if how == "flushed":
        sys.exit(f"error: {path}: {error}")
    if how == "traceback":
        raise
"""


def writer(folder: Path, how: str) -> Case:
    """A small command that writes `now/file` in the way `how`."""
    script = folder / "writer.py"
    (folder / "before").mkdir()
    script.write_text(WRITER)
    command = [str(script), "content", str(folder / "now" / "file"), how]
    return Case(folder, command, file_hashes, lambda now: None)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("flushed", ""),
        ("traceback", "a traceback"),
        ("silent", "not that of a run without a fault"),
    ],
)
def test_a_command_that_hides_a_fault_is_found(tmp_path, how, says):
    lines: list[str] = []
    faults = list(inject.hurt(writer(tmp_path, how), ["ENOSPC"], 1, 9, lines.append, "write"))
    assert says in "".join(faults) and len(faults) == bool(says), faults
    assert len(lines) == 2 and "NOT REACHED" not in lines[1]


def test_a_rename_before_a_flush_loses_the_content(tmp_path):
    case = writer(tmp_path, "silent")
    calls, _ = power.recorded(case)
    case.reset()
    disk, dice = Disk(case.now), random.Random(1)
    for _ in disk.replay(calls):
        pass
    left = {loss: disk.after(loss, dice) for loss in LOSSES[:3]}
    assert left == {"dropped": {}, "names": {"file": b""}, "zeros": {"file": bytes(7)}}
    assert disk.now() == {"file": b"content"}
    assert any("what the command had written is gone" in each for each in lost(case, ""))


def test_what_was_flushed_before_a_rename_is_whole_or_absent(tmp_path):
    case = writer(tmp_path, "flushed")
    calls, _ = power.recorded(case)
    for name, state, _ in power.states(case, calls, 1):
        if "before" not in name:
            assert state.get("file", b"content") == b"content"


def lost(case: Case, only: str) -> list[str]:
    return list(power.lose(case, 1, 99, lambda line: None, only))


@pytest.mark.parametrize(
    ("command", "error", "calls"),
    [
        (
            "prepare",
            "EIO",
            r"ftruncate x_text_document.bin.part #1|rename x_text_document.bin.part",
        ),
        ("train", "ENOSPC", r"write run/.lease-1|fsync run/.config.yml"),
    ],
)
def test_a_failed_call_ends_the_command_with_its_error(tmp_path, command, error, calls):
    case, lines = CASES[command](tmp_path / command), []
    assert list(inject.hurt(case, [error], 1, 9, lines.append, calls)) == []
    assert [line.endswith("ended with its error") for line in lines[1:]] == [True] * 2, lines


@pytest.mark.parametrize(
    ("command", "when"),
    [
        ("prepare", "^dropped at the end|^mixed before rename .*json$"),
        ("fresh_train", "^names (at the end|before fsync run$)"),
    ],
)
def test_a_command_goes_on_after_a_power_loss(tmp_path, command, when):
    lines: list[str] = []
    case = POWER[command](tmp_path / command)
    assert list(power.lose(case, 1, 3, lines.append, when)) == []
    assert len(lines) > 1, lines


def test_a_trace_names_each_file(tmp_path):
    odd = tmp_path / 'a "b" é <c> 3<d>'
    odd.mkdir()
    script = tmp_path / "script.py"
    script.write_text("import sys, os\nwith open(sys.argv[1], 'w') as f: f.write('5</x>\\x00')")
    run_traced([str(script), str(odd / "f")], tmp_path / "t", ["-e", f"trace={','.join(KINDS)}"])
    found = [
        call for call in read_trace(tmp_path / "t") if call.writes and str(odd) in call.paths[0]
    ]
    assert [(call.kind, call.paths) for call in found] == [
        ("openat", [str(odd / "f")]), ("write", [str(odd / "f")])
    ]  # fmt: skip
