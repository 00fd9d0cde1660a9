"""Record every collective and every message of a process, with its line of code.

A `TorchDispatchMode` sees the operations `c10d::*`, with which torch communicates. It does not see
three things, for which `recording` replaces functions of Python:

- a thread that starts later, such as the one that writes checkpoints: it gets a mode of its own;
- the creation of process groups, which every rank must do in the same order;
- exchanges of objects, whose messages have sizes that depend on the objects of all ranks: such an
  exchange is one event.
"""

from __future__ import annotations

import re
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[2]
MESSAGES = ("send", "recv")
WRAPPERS = ("torch/", "deepspeed/comm/", "deepspeed/runtime/pipe/p2p.py")
"""The start of the paths of files whose lines say nothing about the place of an event."""
_EMPTY = (
    torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty,
    torch.ops.aten.empty_strided, torch.ops.aten.new_empty_strided,
)  # fmt: skip


class Event(NamedTuple):
    """A collective or a message of one rank.

    Attributes:
        op: The name of the operation, as in torch's namespace `c10d`, or of a function of torch.
        group: The ranks of the process group, as text (see `EventLog.members`).
        peer: The rank that is sent to or received from, or the root of a collective; else None.
        what: The data types and shapes of the tensors, and how they are reduced.
        where: The line of code, and the line of the project from which it was called.
    """

    op: str
    group: str
    peer: int | None
    what: str
    where: str


class Others(Protocol):
    """The other ranks, as an imagined rank sees them."""

    def reply(self, event: Event, tensors: Sequence[Tensor]) -> None:
        """Fill `tensors` as the other ranks would."""
        ...


class EventLog:
    """The events of one process.

    Args:
        others: What stands in for the other ranks. None if there are real ones.

    Attributes:
        threads: Maps the number of each thread that communicates to its events in order.
        members: Maps the text of a group to its ranks. Groups of the same ranks have different
            texts, such as "0 to 3" and "0 to 3 (group 2 of these)".
    """

    def __init__(self, others: Others | None = None):
        self.others = others
        self.threads: dict[int, list[Event]] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        self._texts: dict[str, str] = {}
        self._groups_of: Counter[str] = Counter()
        self._known: dict[Event, Event] = {}
        self.name(dist.group.WORLD)

    def name(self, group: Any) -> None:
        """Give the new process group `group` a text, which is the same on all its ranks."""
        ranks = dist.get_process_group_ranks(group)
        text = ranks_text(ranks)
        self._groups_of[text] += 1
        if self._groups_of[text] > 1:
            text += f" (group {self._groups_of[text]} of these)"
        self._texts[group.group_name], self.members[text] = text, tuple(ranks)

    def text_of(self, group: Any) -> str:
        """Return the text of a process group; None is the group of all ranks."""
        group = group or dist.group.WORLD
        return self._texts[group.group_name]

    def add(self, op: str, group: str, peer: int | None = None, what: str = "") -> Event:
        """Append an event of this thread, and return it."""
        event = Event(op, group, peer, what, line_of_code())
        event = self._known.setdefault(event, event)  # equal events are one object
        self.threads.setdefault(threading.get_ident(), []).append(event)
        return event

    def add_group(self, ranks: Sequence[int]) -> None:
        """Append the creation of a group. Creations in one line are one event with a checksum."""
        event = self.add("new_group", self.text_of(None))
        events = self.threads[threading.get_ident()]
        text, number = ranks_text(ranks), 1
        if len(events) > 1 and events[-2]._replace(what="") == event:
            events.pop()
            number += int(events[-1].what.split()[0])
            text = events[-1].what + text
        events[-1] = event._replace(what=f"{number} groups, checksum {zlib.crc32(text.encode())}")


class _Mode(TorchDispatchMode):
    def __init__(self, log: EventLog):
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            names = [each.name for each in func._schema.arguments]
            named = dict(zip(names, args, strict=False)) | (kwargs or {})
            self._add(func._schema.name.removeprefix("c10d::").strip("_"), named)
        elif self._log.others and func.overloadpacket in _EMPTY:
            found.zero_()  # what no rank fills is a number, not garbage
        return found

    def _add(self, op: str, named: dict[str, Any]) -> None:
        log = self._log
        group = log.text_of(dist.ProcessGroup.unbox(named["process_group"]))
        tensors = [x for x in tree_leaves(list(named.values())) if isinstance(x, Tensor)]
        roots = [log.members[group][named[x]] for x in ("dst", "src", "root_rank") if x in named]
        what = [] if op == "barrier" else [_described(x) for x in tensors]
        what += [_reduction()] if "reduce_op" in named else []
        what += [f"tag {named['tag']}"] if named.get("tag") else []
        event = log.add(op, group, roots[0] if roots else None, ", ".join(what))
        if log.others:
            with _disable_current_modes():
                log.others.reply(event, tensors)


@contextmanager
def recording(log: EventLog) -> Iterator[None]:
    """Record in `log` what this process communicates during the `with` block."""
    run, new_group, gather = threading.Thread.run, dist.new_group, dist.all_gather_object

    def run_recorded(self: threading.Thread) -> None:
        with _Mode(log):
            run(self)

    def created(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        ranks = range(dist.get_world_size()) if ranks is None else ranks
        log.add_group(ranks)
        is_member = dist.get_rank() in ranks
        if log.others and not is_member:
            return dist.GroupMember.NON_GROUP_MEMBER
        with _disable_current_modes():
            if log.others:  # the other backends wait for the other ranks
                args, kwargs = (), {"backend": "fake"}
            group = new_group(list(ranks), *args, **kwargs)
        if is_member:
            log.name(group)
        return group

    def gathered(found: list[Any], value: Any, group: Any = None) -> None:
        log.add("all_gather_object", log.text_of(group))
        if log.others:
            found[:] = [value] * len(found)
        else:
            with _disable_current_modes():
                gather(found, value, group)

    with ExitStack() as stack:
        replaced = (threading.Thread, "run", run_recorded), (dist, "new_group", created)
        for owner, name, function in (*replaced, (dist, "all_gather_object", gathered)):
            stack.enter_context(mock.patch.object(owner, name, function))
        stack.enter_context(_Mode(log))
        yield


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as a short text: "0 to 3", "0 to 12 in steps of 4" or "1, 2, 5"."""
    steps = {b - a for a, b in zip(ranks, ranks[1:], strict=False)}
    if len(ranks) < 3 or len(steps) > 1:
        return ", ".join(map(str, ranks))
    (step,) = steps
    return f"{ranks[0]} to {ranks[-1]}" + (f" in steps of {step}" if step != 1 else "")


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _reduction() -> str:
    """Return how the collective in progress reduces, such as SUM.

    The object that the dispatcher passes cannot be read, so this reads torch's own options.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and "opts" not in frame.f_code.co_varnames:
        frame = frame.f_back
    reduce_op = getattr(frame.f_locals.get("opts"), "reduceOp", None)
    return str(getattr(reduce_op, "op", reduce_op)).rpartition(".")[2]


def line_of_code() -> str:
    """Return the line that communicates, and two lines of the project from which it was called.

    The second line is the first outside `megatron/parallel/`, and the third is the first of the
    packages above `engine`, such as the validation. Lines of torch, of DeepSpeed's wrappers and of
    this package do not count.
    """
    frame, found, wanted = sys._getframe(1), [], 1
    while frame is not None and wanted <= len(CALLERS):
        path = frame.f_code.co_filename
        if path not in _FILES:
            _FILES[path] = _short(path)
        name, kind = _FILES[path]
        if kind >= wanted:
            found.append(f"{name}:{frame.f_lineno}")
            wanted = kind + 1
        frame = frame.f_back
    return ", called from ".join(found)


CALLERS = ("", "megatron/(?!parallel/)", "megatron/(evaluation|pretraining)/")
"""Patterns of the files whose lines are named, each the first of its kind."""
_FILES: dict[str, tuple[str, int]] = {}
"""Maps the path of a file of code to its short name, and to the number of `CALLERS` that match."""


def _short(path: str) -> tuple[str, int]:
    _, package, name = path.rpartition("site-packages/")
    if not package:
        own = Path(path)
        if not own.is_relative_to(ROOT) or own.parent == Path(__file__).parent:
            return "", 0
        name = str(own.relative_to(ROOT))
    elif name.startswith(WRAPPERS):
        return "", 0
    return name, sum(re.match(pattern, name) is not None for pattern in CALLERS)
