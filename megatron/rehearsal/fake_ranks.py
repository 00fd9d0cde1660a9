"""Run a job as each of its ranks, a few at a time, on torch's fake process group.

The fake process group sends nothing. Every collective returns the rank's own values. However, what
a job does next may depend on integers from other ranks. For example, DeepSpeed sends the shapes of
tensors between pipeline stages, and compares the order of ZeRO-3's parameters with rank 0.
Therefore the integers that earlier ranks sent or broadcast are replayed to later ranks. All other
numbers that a rank receives are zero.

Each rank runs in a fork of this process, because DeepSpeed stores state in its modules. This
process has imported all modules before. Each rank writes to an empty folder of its own, because
earlier ranks have already saved a checkpoint.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import shutil
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.rehearsal.event_log import MESSAGES, Event, EventLog, recording

Sent = dict[tuple, list[list[int] | None]]
"""Maps (group, sender, receiver) to the messages, and (group, root) to the broadcasts, in order.
Each message or broadcast is a list of integers, or None if it contains other numbers."""
_HALF = "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported"


class Played(NamedTuple):
    """The result of running the job as one rank.

    Attributes:
        threads: The events of each thread of the rank.
        members: Maps the text of a process group, such as "0 to 3", to the group's ranks.
        sent: The integers that the rank sent.
        error: The traceback of the error that ended the rank. It is "" if there was no error.
        modules: The names of the modules that rank 0 imported. Empty for other ranks.
    """

    threads: list[list[Event]]
    members: dict[str, list[int]]
    sent: Sent
    error: str
    modules: list[str]


class EarlierRanks:
    """A substitute for the other ranks. It replays the integers that earlier ranks sent.

    Attributes:
        sent: The integers that this rank sends. They are replayed to later ranks.
    """

    def __init__(self, rank: int, sent: Sent):
        self.rank, self._received = rank, {key: iter(each) for key, each in sent.items()}
        self.sent: Sent = defaultdict(list)

    def reply(self, event: Event, tensors: Sequence[Tensor]) -> None:
        """Act as the other ranks in `event`: fill a received tensor, or store a sent tensor.

        A received tensor is filled with the integers that its sender sent. If they are not known,
        it is filled with zeros. The integers of a sent tensor are stored in `sent`.
        """
        key: tuple = event.group, event.peer
        sends = event.op == "send" or (event.op == "broadcast" and event.peer == self.rank)
        if event.op in MESSAGES:
            ends = (self.rank, event.peer) if sends else (event.peer, self.rank)
            key = event.group, *ends
        elif event.op != "broadcast":
            return
        (x,) = tensors
        if sends:
            counts = x.dtype in (torch.int32, torch.int64)
            self.sent[key].append(x.flatten().tolist() if counts else None)
            return
        sent = next(self._received.get(key, iter(())), None)
        known = sent is not None and len(sent) == x.numel()
        with torch.no_grad():
            x.copy_(torch.tensor(sent, dtype=x.dtype).view(x.shape) if known else torch.zeros(()))


def play_all(
    job: Callable[[], object], size: int, stages: int, folder: Path, at_once: int
) -> Iterator[Played]:
    """Run `job` once as each of `size` ranks, and yield the result of each rank, in order.

    Args:
        job: A function that joins the job as the rank in the environment variable RANK, and runs
            the job.
        size: The number of ranks of the job.
        stages: The number of pipeline stages. The ranks of a stage are consecutive.
        folder: An empty folder for the ranks' files.
        at_once: The number of ranks that run at the same time.
    """
    # `job` may write into the subfolder "run" of the current folder.
    context, sent, first = multiprocessing.get_context("fork"), {}, 0
    while first < size:
        # A rank needs the integers of the earlier stages and of rank 0, which also runs alone.
        together = range(first, min(first + min(at_once, size // stages), size) if first else 1)
        pipes = {rank: context.Pipe(duplex=False) for rank in together}
        for rank, (_, pipe) in pipes.items():
            args = pipe, rank, size, job, sent, folder / f"rank{rank}"
            context.Process(target=_play, args=args, daemon=True).start()
            pipe.close()
        for rank, (pipe, _) in pipes.items():
            try:
                played = pipe.recv()
            except EOFError:
                played = Played([], {}, {}, "the process was killed", [])
            for name in played.modules:  # so the other ranks need not import them
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            shutil.rmtree(folder / f"rank{rank}", ignore_errors=True)
            sent |= played.sent
            yield played
        gc.freeze()
        first = together.stop


def _play(
    pipe: Connection, rank: int, size: int, job: Callable[[], object], sent: Sent, folder: Path
) -> None:
    """Run `job` as one of `size` ranks in this forked process, and send the result to `pipe`."""
    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(size))
    os.environ.pop("MASTER_ADDR", None)  # of a launcher, whose job this is not
    others, error = EarlierRanks(rank, sent), ""
    (folder / "run").mkdir(parents=True)
    os.chdir(folder)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    log = EventLog(others.reply)
    with (
        Path("output").open("w") as output,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        mock.patch(_HALF, lambda self: True),
    ):
        try:
            with recording(log):
                job()
        except BaseException:
            error = traceback.format_exc()
    modules = list(sys.modules) if rank == 0 else []
    pipe.send(Played(list(log.threads.values()), log.members, dict(others.sent), error, modules))
    pipe.close()
    os._exit(0)
