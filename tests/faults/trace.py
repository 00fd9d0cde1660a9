"""Run commands under strace, and read the system calls of a trace.

A command is forked from a process that has already imported torch and DeepSpeed, so a run takes
seconds less. It waits until strace is attached (see `traced.py`). strace must be installed (the
package `strace` of Debian).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.launch import PRELOADED, start_script
from tests.helpers.paths import ROOT

# The tables and pictures of an evaluation need them. Under strace, their imports are slow.
PRELOADED += ["pandas", "matplotlib.backends.backend_agg", "matplotlib.figure", "scipy.stats"]

NEEDED = "needs strace: install Debian's package strace, then run pytest tests/faults"
KINDS = (
    "open", "openat", "creat", "write", "pwrite64", "writev", "pwritev", "pwritev2", "fsync",
    "fdatasync", "sync_file_range", "rename", "renameat", "renameat2", "link", "linkat", "symlink",
    "symlinkat", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat", "ftruncate", "truncate",
    "fallocate", "sendfile", "copy_file_range",
)  # fmt: skip
"""The system calls that change or create files, or flush them."""
ALSO = (
    "lseek", "close", "dup", "dup2", "dup3", "fcntl", "mmap", "read", "clone", "clone3", "fork",
    "vfork",
)  # fmt: skip
"""The system calls that the model of a disk needs besides (see `disk.py`)."""
_ARGUMENT = re.compile(
    r'(?:AT_FDCWD|\b\d+)<(?P<at>(?:[^<>\\]|\\.)*)>|"(?P<text>(?:[^"\\]++|\\.)*+)"'
)
"""A file descriptor with its path, or a string."""


@dataclass(frozen=True)
class Call:
    """One system call of a trace.

    Attributes:
        thread: The id of the thread that made it.
        kind: The name of the system call.
        arguments: Its arguments, as strace writes them.
        result: The value that it returned; -1 is an error.
        note: The text after the value, such as `ENOSPC (No space left on device) (INJECTED)`.
    """

    thread: int
    kind: str
    arguments: str
    result: int
    note: str

    @property
    def folders(self) -> list[str]:
        """The paths of the file descriptors among the arguments."""
        return [
            unescaped(each["at"]).decode()
            for each in _ARGUMENT.finditer(self.arguments)
            if each["at"] is not None
        ]

    @property
    def names(self) -> list[str]:
        """The paths among the arguments, as the process wrote them."""
        if self.kind in ("write", "pwrite64", "writev", "pwritev", "pwritev2", "read"):
            return []
        found = [each["text"] for each in _ARGUMENT.finditer(self.arguments)]
        return [unescaped(each).decode() for each in found if each is not None]

    @property
    def paths(self) -> list[str]:
        """The absolute paths of the call: those of its names, or that of its descriptor."""
        folders = self.folders
        if not self.names:
            return folders[:1]
        folders = [*folders, *(folders[-1:] or [str(ROOT)]) * len(self.names)]
        return [str(Path(at, name)) for at, name in zip(folders, self.names, strict=False)]

    @property
    def writes(self) -> bool:
        """Whether the call is one of KINDS, and does not open a file only to read it."""
        if self.kind in ("open", "openat"):
            return re.search(r"O_WRONLY|O_RDWR|O_CREAT", self.arguments) is not None
        return self.kind in KINDS

    @property
    def injected(self) -> bool:
        """Whether strace made the call fail."""
        return "(INJECTED)" in self.note


def unescaped(text: str) -> bytes:
    """Return the bytes that strace has written as a C string."""
    if text.startswith("\\x") and len(text) % 4 == 0 and text.count("\\x") * 4 == len(text):
        return bytes.fromhex(text.replace("\\x", ""))
    return text.encode().decode("unicode_escape").encode("latin-1")


def read_trace(path: Path) -> Iterator[Call]:
    """Yield the calls of a trace, in the order in which they returned."""
    begun: dict[str, str] = {}
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            thread, _, text = line.rstrip("\n").partition(" ")
            text = text.lstrip()
            if text.endswith("<unfinished ...>"):
                begun[thread] = text.removesuffix("<unfinished ...>").rstrip()
                continue
            if text.startswith("<... "):
                text = begun.pop(thread, "") + text.partition("resumed>")[2]
            found = re.match(r"(\w+)\((.*)\)\s+= (-?\d+|0x[0-9a-f]+|\?)(.*)", text, re.DOTALL)
            if found:
                kind, arguments, value, note = found.groups()
                result = -1 if value == "?" else int(value, 0)
                yield Call(int(thread), kind, arguments, result, note.strip())


def installed() -> bool:
    """Return whether strace is there and may trace a process."""
    program = shutil.which("strace")
    return (
        bool(program)
        and not subprocess.run(
            [program, "-o", os.devnull, "true"], capture_output=True, check=False
        ).returncode
    )


@dataclass(frozen=True)
class Done:
    """A command that has ended.

    Attributes:
        code: Its exit code.
        text: What it printed on stdout and stderr.
        pid: Its process id.
        seconds: How long it took.
    """

    code: int
    text: str
    pid: int
    seconds: float


def run_traced(
    command: Sequence[str], trace: Path | None, options: Sequence[str] = (), limit: float = 240
) -> Done:
    """Run a command of the project under strace, and write its calls to the file `trace`.

    Args:
        command: The path of a script in this repository, and its arguments.
        trace: The file for the trace; None runs the command without strace.
        options: Options of strace. `{pid}` in them becomes the process id of the command.
        limit: The seconds after which the command is killed.
    """
    begun = time.monotonic()
    environ = os.environ | ({"TRACED": "1"} if trace else {})
    with os.fdopen(os.memfd_create("output"), "r+", errors="replace") as output:
        script = [str(Path(__file__).with_name("traced.py")), *map(str, command)]
        process = start_script(script, output.fileno(), cwd=ROOT, environ=environ)
        if trace is not None:
            filled = [each.replace("{pid}", str(process.pid)) for each in options]
            tracer = subprocess.Popen(
                ["strace", "-f", "-y", "-qq", "-o", str(trace), "-p", str(process.pid), *filled],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            with suppress(subprocess.TimeoutExpired):
                _, said = tracer.communicate(timeout=limit)  # it ends after the command
                assert tracer.returncode == 0 or not process.is_alive(), said
        process.join(limit if trace is None else 10)
        if process.exitcode is None:
            process.kill()
            process.join()
        output.seek(0)
        text = output.read()
    assert process.exitcode is not None
    return Done(process.exitcode, text, process.pid, time.monotonic() - begun)


def counted(calls: Sequence[Call]) -> Iterator[tuple[Call, str, int]]:
    """Yield each call, the path by which strace can select it, and the call's number.

    The number counts the calls of the same thread and kind that this path selects, from 1.
    """
    numbers: Counter[tuple[int, str, str]] = Counter()
    for call in calls:
        at = call.folders
        known = dict.fromkeys([*call.names, *at])
        for each in known:
            numbers[call.thread, call.kind, each] += 1
        if known:
            chosen = next(iter(known))
            yield call, chosen, numbers[call.thread, call.kind, chosen]
