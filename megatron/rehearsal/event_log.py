"""Record the collectives and messages of a process, with their lines of code.

`recording` replaces all methods of torch's `ProcessGroup` that this project and DeepSpeed call, in
every thread. Functional collectives, and receives from any rank, are not recorded. (A
`TorchDispatchMode` would see the same operations, but also all other operations of torch. It would
take half of the running time.) Two more functions are replaced:

- `new_group`, because every rank must create the process groups in the same order.
- `all_gather_object`, because the sizes of its messages depend on the objects of all ranks. Such an
  exchange of objects is recorded as one event.
"""

import inspect
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[2]
OTHERS = {"recv_anysource", "_end_coalescing"}
OPERATIONS = [
    name
    for name, method in inspect.getmembers(dist.ProcessGroup)
    if re.search(r"\) -> \S+Work$", method.__doc__ or "", re.M) and name not in OTHERS
]
"""The methods of a process group that communicate: those that return a `Work`, without `OTHERS`."""
MESSAGES = ("send", "recv")
WRAPPERS = ("torch/", "typing_extensions", "deepspeed/comm/", "deepspeed/runtime/pipe/p2p.py")
"""Files whose path starts with one of these texts are skipped when an event's line is chosen."""
CALLERS = ("", "megatron/(?!parallel/)", "megatron/(evaluation|pretraining)/")
"""Patterns of file names. An event names the innermost line of the call stack for each pattern."""


class Event(NamedTuple):
    """A collective, a send or a receive by one rank.

    Attributes:
        op: The name of the operation, as in torch's `ProcessGroup` or `torch.distributed`.
        group: The ranks of the process group as a text, such as "0 to 3".
        peer: The other rank of a send or receive, or the root of a collective. Otherwise None.
        what: A text with the dtypes and shapes of the tensors, and with the reduction.
        where: The line of code that communicates, and the lines of the project that called it.
    """

    op: str
    group: str
    peer: int | None
    what: str
    where: str


Reply = Callable[[Event, Sequence[Tensor]], None]
"""A function of an event and its tensors that fills the tensors as the other ranks would."""


class EventLog:
    """The collectives, sends and receives of one process, in order.

    Args:
        reply: A function that fills received tensors in place of the other ranks. None if the other
            ranks are real processes.

    Attributes:
        threads: Maps the id of each thread that communicates to the thread's list of events.
        members: Maps the text of a process group, such as "0 to 3", to the group's ranks.
        here: A `threading.local`. Its attribute `paused` is true while the events of a thread are
            not recorded.
    """

    # Two groups of the same ranks have different texts, such as "0 to 3" and "0 to 3 (group 2 of
    # these)".

    def __init__(self, reply: Reply | None = None):
        self.reply = reply
        self.threads: dict[int, list[Event]] = {}
        self.members: dict[str, list[int]] = {}
        self._texts: dict[str, str] = {}
        self._count: Counter[str] = Counter()
        self.here = threading.local()
        self.name(dist.group.WORLD)

    def name(self, group: Any) -> None:
        """Name the new process group `group` by a text, and store the text and the ranks."""
        ranks = dist.get_process_group_ranks(group)
        text = ranks_text(ranks)
        self._count[text] += 1
        number = self._count[text]
        text += f" (group {number} of these)" if number > 1 else ""
        self._texts[group.group_name], self.members[text] = text, ranks

    def add(
        self,
        op: str,
        group: Any,
        what: str,
        tensors: Sequence[Tensor] = (),
        peer: int | None = None,
    ) -> None:
        """Append a collective, a send or a receive of this thread.

        Args:
            op: The name of the operation, as in torch's `ProcessGroup`.
            group: The process group. None means the group of all ranks.
            what: A text with the dtypes and shapes of the tensors, and with the reduction.
            tensors: The tensors that are sent or received.
            peer: The other rank, or the root of a collective, counted within `group`.
        """
        if getattr(self.here, "paused", False):
            return
        text = self._texts[(group or dist.distributed_c10d._get_default_group()).group_name]
        rank = None if peer is None else self.members[text][peer]
        event = Event(op, text, rank, what, line_of_code())
        self.threads.setdefault(threading.get_ident(), []).append(event)
        if self.reply:
            self.reply(event, tensors)


def _recorded(log: EventLog, op: str) -> Callable[..., Any]:
    """Return a version of `ProcessGroup`'s method `op` that also adds an event to `log`."""
    original = getattr(dist.ProcessGroup, op)

    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(group, *args, **kwargs)
        options = [*args, *kwargs.values()]
        tensors = [x for x in tree_leaves(options) if isinstance(x, Tensor)]
        what = [f"{x.dtype}{list(x.shape)}".removeprefix("torch.") for x in tensors]
        reductions = [x.reduceOp for x in options if hasattr(x, "reduceOp")]
        what += [str(getattr(x, "op", x)).rpartition(".")[2] for x in reductions]
        peers = [x.rootRank for x in options if hasattr(x, "rootRank")]
        if op in MESSAGES:
            _, peer, tag = options
            peers, what = [peer], [*what, f"tag {tag}"] if tag else what
        log.add(op.strip("_"), group, ", ".join(what), tensors, *peers)
        return found

    return method


@contextmanager
def recording(log: EventLog) -> Iterator[None]:
    """Record this process's collectives, sends and receives in `log` during the `with` block."""
    new_group, gather = dist.new_group, dist.all_gather_object

    def created(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        log.add("new_group", None, f"the ranks {ranks_text(ranks)}")
        is_member = dist.get_rank() in ranks
        if log.reply:  # other backends wait for the other ranks
            args, kwargs = (), {"backend": "fake"}
        if log.reply and not is_member:
            return dist.GroupMember.NON_GROUP_MEMBER
        group = new_group(ranks, *args, **kwargs)
        if is_member:
            log.name(group)
        return group

    def gathered(found: list[Any], value: Any, group: Any = None) -> None:
        log.add("all_gather_object", group, "")
        found[:] = [value] * len(found)
        if not log.reply:
            with mock.patch.object(log.here, "paused", True, create=True):
                gather(found, value, group)

    replaced = [(dist.ProcessGroup, op, _recorded(log, op)) for op in OPERATIONS]
    replaced += [(dist, "new_group", created), (dist, "all_gather_object", gathered)]
    with ExitStack() as stack:
        for owner, name, function in replaced:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as a short text: "0 to 3", "0 to 12 in steps of 4" or "1, 2, 5"."""
    step = ranks[1] - ranks[0] if len(ranks) > 2 else 0
    if not step or list(ranks) != list(range(ranks[0], ranks[-1] + 1, step)):
        return ", ".join(map(str, ranks))
    return f"{ranks[0]} to {ranks[-1]}" + (f" in steps of {step}" if step != 1 else "")


def line_of_code() -> str:
    """Return a text that names up to three lines of code of the call stack, the innermost first.

    The first is the line that communicates. The second is the next line of the project outside
    `megatron/parallel/`. The third is the next line in `megatron/evaluation/` or
    `megatron/pretraining/`. Lines of torch, DeepSpeed's wrappers and this package are skipped.
    """
    frame, found, last = sys._getframe(1), [], 0
    while frame is not None and last < len(CALLERS):
        name, kind = _file(frame.f_code.co_filename)
        if kind > last:
            found.append(f"{name}:{frame.f_lineno}")
            last = kind
        frame = frame.f_back
    return ", called from ".join(found)


@cache
def _file(path: str) -> tuple[str, int]:
    """Return (short name of a source file, number of patterns in `CALLERS` that match the name).

    For a file that no event names, such as a file of this folder, the result is ("", 0).
    """
    _, package, name = path.rpartition("site-packages/")
    if not package and Path(path).is_relative_to(ROOT):
        name = str(Path(path).relative_to(ROOT))
    if name.startswith((*WRAPPERS, "/", "<", "megatron/rehearsal/")):
        return "", 0
    return name, sum(re.match(pattern, name) is not None for pattern in CALLERS)
