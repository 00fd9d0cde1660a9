"""Run the commands of data preparation as real processes, which a test can pause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.paths import ROOT

SUFFIXES = (".bin", ".idx", ".json")
# prepare_data.py with chunks of 64 KB, so that a short text has many. With PAUSE_AT=n in the
# environment it prints "paused" after it has written the journal n times, and waits for a line.
SMALL_CHUNKS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
from megatron.data.prepare import chunks
chunks.CHUNK_BYTES = 1 << 16
import prepare_data
from megatron.data.prepare.journal import Journal
write, left = Journal.write, [int(os.environ.get("PAUSE_AT", 0))]
def write_and_pause(journal, state):
    write(journal, state)
    left[0] -= 1
    if left[0] == 0:
        print("paused", flush=True)
        sys.stdin.readline()
Journal.write = write_and_pause
sys.exit(prepare_data.main(sys.argv[1:]))
"""


def command(*arguments: object, script: str | None = None) -> list[str]:
    """Return a command line for prepare_data.py with small chunks, or for another `script`."""
    program = ["-c", SMALL_CHUNKS] if script is None else [str(ROOT / script)]
    return [sys.executable, *program, *map(str, arguments)]


def call(*arguments: object, code: int = 0, script: str | None = None, **options) -> str:
    """Run a command to its end, and return its output on both streams."""
    done = subprocess.run(
        command(*arguments, script=script),
        capture_output=True, text=True, timeout=240, cwd=ROOT, **options,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def begin_and_pause(*arguments: object, at: int) -> subprocess.Popen:
    """Start a run that writes its journal after each chunk; wait until it pauses at chunk `at`."""
    process = subprocess.Popen(
        command(*arguments, "--checkpoint-seconds", 0),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, env=os.environ | {"PAUSE_AT": str(at)},
    )  # fmt: skip
    assert process.stdout.readline() == "paused\n", process.communicate()
    return process


def content(prefix: str | Path, suffixes: tuple[str, ...] = SUFFIXES) -> dict[str, bytes]:
    return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in suffixes}


def alive(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
