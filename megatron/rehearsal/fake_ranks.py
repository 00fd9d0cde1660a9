"""Run a job as each of its ranks, one after another, on torch's fake process group.

The fake group sends nothing: a rank gets its own values back from every collective. Integers decide
what a job does next (DeepSpeed sends the shapes of tensors between pipeline stages, and compares
the order of ZeRO-3's parameters with rank 0). So a rank gets the integers that earlier ranks sent
or broadcast. All other numbers that it receives are zero.

Each rank is a fork of this process, which has imported all modules, because DeepSpeed keeps state
in its modules. Each has an empty folder of its own, because the earlier ranks have already saved.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import shutil
import sys
import traceback
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.rehearsal.event_log import MESSAGES, Event, EventLog, recording

Sent = dict[tuple, list[list[int] | None]]
"""Maps (group, sender, receiver) of messages, or (group, root) of broadcasts, to the integers of
each of them in order. None stands for other numbers."""
_HALF = "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported"
LONGEST = 1 << 16
"""The largest number of integers that are kept of one message."""


@dataclass
class Played:
    """What one rank did.

    Attributes:
        threads: The events of each of its threads.
        members: Maps the text of a group to its ranks.
        sent: The integers that it sent.
        error: The traceback of the error that ended the rank, or "".
        modules: The names of the modules that it has imported.
    """

    threads: list[list[Event]]
    members: dict[str, tuple[int, ...]]
    sent: Sent
    error: str = ""
    modules: list[str] = field(default_factory=list)


class EarlierRanks:
    """Replies to a rank with the integers that earlier ranks sent, and keeps those it sends."""

    def __init__(self, rank: int, sent: Sent):
        self.rank, self.earlier = rank, sent
        self.sent: Sent = defaultdict(list)
        self._received: Counter[tuple] = Counter()

    def reply(self, event: Event, tensors: Sequence[Tensor]) -> None:
        """Fill the received tensor with integers, if its sender sent integers."""
        key: tuple = event.group, event.peer
        if event.op not in (*MESSAGES, "broadcast"):
            return
        sends = event.op == "send" or (event.op == "broadcast" and event.peer == self.rank)
        if event.op in MESSAGES:
            ends = (self.rank, event.peer) if sends else (event.peer, self.rank)
            key = event.group, *ends
        (x,) = tensors
        if sends:
            counts = x.dtype in (torch.int32, torch.int64) and x.numel() <= LONGEST
            self.sent[key].append(x.flatten().tolist() if counts else None)
            return
        number, self._received[key] = self._received[key], self._received[key] + 1
        sent = self.earlier.get(key, [])[number : number + 1]
        if sent and sent[0] is not None and len(sent[0]) == x.numel():
            x.copy_(torch.tensor(sent[0], dtype=x.dtype).view(x.shape))


def play_all(
    job: Callable[[], object], size: int, stages: int, folder: Path, at_once: int
) -> Iterator[tuple[int, Played]]:
    """Run `job` as each of `size` ranks, and yield each rank and what it did, in any order.

    Args:
        job: A function that joins the job of the environment's RANK and WORLD_SIZE. It may write
            into the folder "run" of the current folder.
        stages: The number of pipeline stages, whose ranks follow each other.
        folder: An empty folder.
        at_once: The number of ranks that run at the same time.
    """
    context = multiprocessing.get_context("fork")
    sent: Sent = {}
    running: dict[Any, tuple[int, Any]] = {}
    left, done = list(range(size))[::-1], set()
    while left or running:
        # A rank needs the integers of rank 0 and of the earlier stages.
        free = left and len(running) < at_once and (not running or 0 in done)
        if free and left[-1] - min((n for n, _ in running.values()), default=size) < size // stages:
            rank = left.pop()
            own = folder / f"rank{rank}"
            ours, theirs = context.Pipe(duplex=False)
            args = theirs, rank, size, job, sent, own
            process = context.Process(target=_play, args=args, daemon=True)
            process.start()
            theirs.close()
            running[ours] = rank, process
            continue
        ready: list[Any] = wait(list(running))
        for pipe in ready:
            rank, process = running.pop(pipe)
            try:
                played = pipe.recv()
            except EOFError:
                process.join()
                played = Played([], {}, {}, f"the process ended with code {process.exitcode}")
            process.join()
            pipe.close()
            if rank == 0:
                _import(played.modules)
            shutil.rmtree(folder / f"rank{rank}", ignore_errors=True)
            sent |= played.sent
            done.add(rank)
            yield rank, played


def _import(modules: Sequence[str]) -> None:
    """Import what the first rank has imported, so that the other ranks need not."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()


def _play(
    pipe: Connection, rank: int, size: int, job: Callable[[], object], sent: Sent, folder: Path
) -> None:
    """Run `job` as the rank `rank` of `size` in this forked process, and send what it did."""
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(size))
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # of a launcher, whose job this is not
        os.environ.pop(name, None)
    others, error = EarlierRanks(rank, sent), ""
    # Rank 0 writes this file at the start, and the other ranks look whether they see it.
    mark = uuid.UUID(int=0)
    uuid.uuid4 = lambda: mark
    (folder / "run").mkdir(parents=True)
    (folder / "run" / ".seen-by-all").write_text(mark.hex)
    os.chdir(folder)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    log = EventLog(others)
    with ExitStack() as stack:
        output = stack.enter_context(Path("output").open("w"))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(output))
        stack.enter_context(mock.patch(_HALF, return_value=True))
        try:
            with recording(log):
                job()
        except BaseException:
            error = traceback.format_exc()
    modules = list(sys.modules) if rank == 0 else []
    played = Played(list(log.threads.values()), log.members, dict(others.sent), error, modules)
    pipe.send(played)
    pipe.close()
    os._exit(0)
