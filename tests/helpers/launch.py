"""Run a function on real gloo processes: what every distributed test uses."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from megatron.engine.job import join

PRELOADED = [
    "megatron.engine.run",
    "megatron.engine.evaluation.by_length",
    "deepspeed.runtime.zero.muon.original_muon",  # any engine imports it, and a compiler with it
]
"""Imported once, by the server from which all ranks are forked: seconds saved for each rank."""


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 280
) -> list[Any]:
    """`[function(groups, *args) on rank r for r in ranks]`; `function` must be importable.

    Args:
        timeout: seconds for the first rank to finish.

    Raises:
        RuntimeError: a rank failed; its traceback is in the text.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_rank, args=(rank, world_size, port, results, function, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    outcome: dict[int, Any] = {}
    try:
        while len(outcome) < world_size:
            rank, error, value = results.get(timeout=timeout)
            if error:
                raise RuntimeError(f"rank {rank}:\n{error}")
            outcome[rank] = pickle.loads(value)
    finally:
        for process in processes:
            if len(outcome) < world_size:
                process.kill()
            process.join()
    return [outcome[rank] for rank in range(world_size)]


def _rank(rank, world_size, port, results, function, args):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        groups = join.join_job()
        value = function(groups, *args)
        groups.barrier()
        results.put((rank, None, pickle.dumps(value)))
        join.leave_job()
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
