"""Model a disk: replay the system calls of a trace, and drop the writes that were not flushed.

Each file has its content and the content of its last fsync; each folder its entries and the
entries of its last fsync. A power loss leaves one of four states:

- `dropped`: nothing but what was flushed. A file whose name was flushed and whose content was not
  is empty.
- `names`: all names (new files, renames, deletions), but only flushed content.
- `zeros`: as `names`, and files have their sizes too, with zeros for what was not flushed.
- `mixed`: some of the names that were not flushed, drawn by a seed, and only flushed content. File
  systems with a journal keep the order of names, others need not.

Not modelled: writes that reach the disk in parts.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.trace import Call, unescaped

LOSSES = ("dropped", "names", "zeros", "mixed")
CUTS = ("rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "fsync", "fdatasync")
"""A power loss is modelled before each of these calls, and after the last call."""
State = dict[str, bytes | None]
"""The content of each file by its path; None for a folder."""
_TEXT = re.compile(r'"([^"]*)"')
"""A string that strace has written in hexadecimal digits."""


@dataclass(eq=False)
class Node:
    """A file or a folder: its content or entries now, and at its last fsync (None: never)."""

    is_folder: bool = False
    data: bytearray = field(default_factory=bytearray)
    synced: bytes | None = None
    entries: dict[str, Node] = field(default_factory=dict)
    synced_entries: dict[str, Node] = field(default_factory=dict)

    def flush(self) -> None:
        self.synced, self.synced_entries = bytes(self.data), dict(self.entries)

    def left_entries(self, loss: str, dice: random.Random) -> dict[str, Node]:
        """Return the entries after a power loss."""
        old, new = self.synced_entries, self.entries
        if loss != "mixed":
            return old if loss == "dropped" else new
        changed = [name for name in {**old, **new} if old.get(name) is not new.get(name)]
        kept = {name: (old if dice.random() < 0.5 else new).get(name) for name in changed}
        return {name: node for name, node in ({**old, **new} | kept).items() if node is not None}

    def left(self, loss: str) -> bytes:
        """Return the content after a power loss."""
        kept = self.synced or b""
        if loss == "zeros":
            size = len(self.data)
            return kept[:size] + bytes(max(0, size - len(kept)))
        return kept


@dataclass(eq=False)
class Opened:
    """An open file: its node, the position in it, and whether writes go to its end."""

    node: Node
    appends: bool
    position: int = 0


class Disk:
    """The folder `root` and all below it, which a traced command changes.

    Args:
        root: The folder. What it holds now counts as flushed.
    """

    def __init__(self, root: Path):
        self.root, self._top = root, _loaded(root)
        self._files: dict[int, dict[int, Opened]] = {}

    def replay(self, calls: Sequence[Call]) -> Iterator[tuple[int, Call]]:
        """Apply the calls in turn. Yield the number and the call before each of the kinds CUTS."""
        leaders, parents = {}, {}
        for call in calls:
            if call.kind in ("clone", "clone3", "fork", "vfork") and call.result > 0:
                same = "CLONE_THREAD" in call.arguments
                (leaders if same else parents)[call.result] = call.thread
        for number, call in enumerate(calls):
            if call.result < 0:
                continue
            inside = [self._inside(path) for path in call.paths]
            if call.kind in CUTS and any(each is not None for each in inside):
                yield number, call
            process = call.thread
            while process in leaders:
                process = leaders[process]
            if process not in self._files:
                above = parents.get(process)
                while above in leaders:
                    above = leaders[above]
                self._files[process] = dict(self._files.get(above or 0, {}))
            self._apply(call, inside, self._files[process])

    def after(self, loss: str, dice: random.Random) -> State:
        """Return what a power loss would leave now."""
        found: State = {}

        def walk(folder: Node, path: str) -> None:
            for name, node in folder.left_entries(loss, dice).items():
                found[f"{path}{name}"] = None if node.is_folder else node.left(loss)
                if node.is_folder:
                    walk(node, f"{path}{name}/")

        walk(self._top, "")
        return found

    def now(self) -> State:
        """Return the content without a loss, to compare it with the real folder."""
        found: State = {}

        def walk(folder: Node, path: str) -> None:
            for name, node in folder.entries.items():
                found[f"{path}{name}"] = None if node.is_folder else bytes(node.data)
                walk(node, f"{path}{name}/")

        walk(self._top, "")
        return found

    def _inside(self, path: str) -> list[str] | None:
        found = Path(path)
        return list(found.relative_to(self.root).parts) if found.is_relative_to(self.root) else None

    def _node(self, parts: Sequence[str]) -> Node:
        node = self._top
        for part in parts:
            node = node.entries[part]
        return node

    def _apply(self, call: Call, inside: list[list[str] | None], files: dict[int, Opened]) -> None:
        numbers = [int(each) for each in re.findall(r"(?:^|, )(\d+)(?=<|,|$)", call.arguments)]
        first = numbers[0] if numbers and call.arguments[:1].isdigit() else -1
        at = inside[0] if inside else None
        opened = files.get(first) if at is not None else None  # a child may have used it otherwise
        match call.kind:
            case "open" | "openat" | "creat":
                files.pop(call.result, None)
                if at is not None:
                    files[call.result] = self._open(call, at)
            case "close":
                files.pop(first, None)
            case "dup" | "dup2" | "dup3" | "fcntl" if (
                "F_DUPFD" in call.arguments or call.kind != "fcntl"
            ):
                files.pop(call.result, None)
                if opened:
                    files[call.result] = opened
            case "mkdir" | "mkdirat" if at is not None:
                self._node(at[:-1]).entries[at[-1]] = Node(is_folder=True)
            case "unlink" | "unlinkat" | "rmdir" if at is not None:
                del self._node(at[:-1]).entries[at[-1]]
            case "rename" | "renameat" | "renameat2":
                self._rename(*inside)
            case "truncate" if at is not None:
                size = int(call.arguments.rpartition(", ")[2])
                _resize(self._node(at).data, size)
            case _ if opened:
                self._change(call, opened, files)
            case "link" | "linkat" | "symlink" | "symlinkat" if any(
                each is not None for each in inside
            ):
                raise ValueError(f"the model of a disk does not know this call: {call}")

    def _open(self, call: Call, at: list[str]) -> Opened:
        if "O_TMPFILE" in call.arguments:
            return Opened(Node(), False)
        folder = self._node(at[:-1])
        if at and at[-1] not in folder.entries:
            folder.entries[at[-1]] = Node()
        node = self._node(at)
        if "O_TRUNC" in call.arguments:
            node.data.clear()
        return Opened(node, "O_APPEND" in call.arguments)

    def _rename(self, source: list[str] | None, target: list[str] | None) -> None:
        if source is None and target is None:
            return
        assert source is not None and target is not None, "a rename into or out of the folder"
        self._node(target[:-1]).entries[target[-1]] = self._node(source[:-1]).entries.pop(
            source[-1]
        )

    def _change(self, call: Call, opened: Opened, files: dict[int, Opened]) -> None:
        node = opened.node
        match call.kind:
            case "write" | "writev":
                content = b"".join(map(unescaped, _TEXT.findall(call.arguments)))[: call.result]
                at = len(node.data) if opened.appends else opened.position
                _put(node.data, at, content)
                opened.position = at + len(content)
            case "pwrite64":
                content = b"".join(map(unescaped, _TEXT.findall(call.arguments)))[: call.result]
                _put(node.data, int(call.arguments.rpartition(", ")[2]), content)
            case "sendfile":
                source, place = re.findall(r", \d+<(.*?)>, (?:\[(\d+)\]|NULL)", call.arguments)[0]
                path = Path(unescaped(source).decode())
                inside = self._inside(str(path))
                data = path.read_bytes() if inside is None else bytes(self._node(inside).data)
                content = data[int(place) :][: call.result]
                _put(node.data, opened.position, content)
                opened.position += len(content)
            case "read":
                opened.position += call.result
            case "lseek":
                opened.position = call.result
            case "ftruncate":
                _resize(node.data, int(call.arguments.rpartition(", ")[2]))
            case "fsync" | "fdatasync":
                node.flush()
            case "mmap" if "PROT_WRITE" in call.arguments and "MAP_SHARED" in call.arguments:
                raise ValueError(f"the model of a disk does not know this call: {call}")
            case "pwritev" | "pwritev2" | "fallocate" | "copy_file_range" | "sync_file_range":
                raise ValueError(f"the model of a disk does not know this call: {call}")


def _loaded(path: Path) -> Node:
    node = Node(is_folder=path.is_dir())
    if node.is_folder:
        node.entries = {each.name: _loaded(each) for each in path.iterdir()}
    else:
        node.data = bytearray(path.read_bytes())
    node.flush()
    return node


def _put(data: bytearray, at: int, content: bytes) -> None:
    if len(data) < at:
        data.extend(bytes(at - len(data)))
    data[at : at + len(content)] = content


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


def write_state(state: State, folder: Path) -> None:
    """Make `folder` hold what `state` describes, with times before the machine started again."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    before = time.time() - 3600
    for name, content in state.items():
        path = folder / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.write_bytes(content)
            os.utime(path, (before, before))
