"""Compare what imagined ranks communicate with what real gloo processes do, event by event.

    python -m tests.rehearsal.gloo --log FILE      every cell of the covering set of layouts

A line is written as soon as its cell is done. A second start skips the cells that have a line.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import multiprocessing
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.config import load_config
from megatron.pretraining.run import Job, train
from megatron.rehearsal.event_log import Event, EventLog, recording
from megatron.rehearsal.fake_ranks import play_all
from tests.distributed.matrix import Cell, keys, missing
from tests.helpers.jobs import write_config, write_shards
from tests.helpers.launch import PRELOADED, run_ranks

Threads = list[list[Event]]


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` in a new process without threads, and return the result."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        return pickle.loads(ours.recv_bytes())
    finally:
        process.join()


def _send(pipe, function, args):
    pipe.send_bytes(pickle.dumps(function(*args)))


def imagined(path: Path, size: int, stages: int, folder: Path) -> list[Threads]:
    """Return the events of each imagined rank of a job."""
    job = partial(train, load_config([path], world_size=size))
    found = list(play_all(job, size, stages, folder, at_once=2))
    assert not any(played.error for played in found), [played.error for played in found]
    return [played.threads for played in found]


def real(groups, path: Path) -> Threads:
    """Return the events of this process of a gloo job."""
    log = EventLog()
    with contextlib.redirect_stdout(io.StringIO()), recording(log), Dispatched(log) as dispatched:
        Job(load_config([path], world_size=groups.world_size), groups).run()
    seen = [each.op for each in log.threads[threading.get_ident()]]
    hidden = seen.count("new_group") + seen.count("all_gather_object")
    assert dispatched.count == len(seen) - hidden, (dispatched.count, len(seen), hidden)
    return list(log.threads.values())


class Dispatched(TorchDispatchMode):
    """Counts what torch's dispatcher communicates in this thread, but for exchanged objects."""

    def __init__(self, log: EventLog):
        super().__init__()
        self.log, self.count = log, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_recorded = not getattr(self.log.here, "paused", False)
        self.count += func.namespace == "c10d" and is_recorded
        return func(*args, **(kwargs or {}))


def both(cell: Cell, folder: Path, prefix: str, **changes: Any) -> tuple[list[Threads], ...]:
    """Return the events of each rank of the cell's job: imagined, and of real processes."""
    one_step = keys(cell) | {"train_iters": 1, "eval_interval": 1} | changes
    found = []
    for name, save in (("imagined", "run"), ("real", str(folder / "run"))):
        path = write_config(folder / f"{name}.yml", prefix, save=save, **one_step)
        if name == "imagined":
            found.append(in_a_process(imagined, path, cell.ranks, cell.pp, folder))
        else:
            found.append(run_ranks(cell.ranks, real, path))
    return tuple(found)


def first_difference(a: Sequence[Threads], b: Sequence[Threads]) -> str:
    """Return the first difference between the events of two jobs, or "" if they are the same."""
    for rank, (ours, theirs) in enumerate(itertools.zip_longest(a, b)):
        if [len(x) for x in ours] != [len(x) for x in theirs]:
            return f"rank {rank}: {[len(x) for x in ours]} and {[len(x) for x in theirs]} events"
        for x, y in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
            if x != y:
                return f"rank {rank}: {x} and {y}"
    return ""


def main() -> int:
    """Return exit code 1 if the events of some cell differ."""
    from tests.distributed.test_matrix import CELLS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True, help="continued if it exists")
    log = parser.parse_args().log
    log.touch()
    for cell in missing(CELLS, log):
        with tempfile.TemporaryDirectory() as name:
            imagined, real = both(cell, Path(name), write_shards(Path(name)))
        events = sum(len(thread) for rank in real for thread in rank)
        verdict = first_difference(imagined, real)
        result = f"FAILED: {verdict}" if verdict else f"{events:6,} events, all equal ok"
        with log.open("a") as file:
            file.write(f"{cell.name:<58} {result}\n")
    failed = log.read_text().count("FAILED")
    with log.open("a") as file:
        file.write(f"# {len(CELLS)} cells, {failed} failed; torch {torch.__version__}\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
