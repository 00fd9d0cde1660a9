"""Joining (or being) a job: the one place that starts torch.distributed and quiets DeepSpeed.

Importing this module imports DeepSpeed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.ops import __compatible_ops__

from megatron.engine.errors import StartError
from megatron.engine.job import failure
from megatron.parallel import Groups, build_groups

LONGEST_WAIT = 60
"""Minutes that ranks wait for rank 0, which converts checkpoints and indexes text alone, unless
DEEPSPEED_TIMEOUT says it: DeepSpeed's own 10 are too few for large ones. A rank that fails is
noticed at once anyway (`parallel.failure`)."""


@contextmanager
def job(*, backend: str | None = None, verbose: bool = False) -> Iterator[Groups]:
    """A job from `start` to `stop`, in which the failure of one rank ends all.

    After an error its groups are left as they are, for all ranks would have to leave them together:
    the caller ends the process (`errors.user_errors`).
    """
    watch = failure.Watch() if failure.is_member() else None
    try:
        groups = start(backend=backend, verbose=verbose)
        yield groups
    except BaseException:
        if watch is None:
            stop()
        raise
    groups.barrier()
    if watch is not None:
        watch.stop()
    stop()


def start(*, backend: str | None = None, verbose: bool = False) -> Groups:
    """Join the job that the environment describes (torchrun's variables), or be a job of one.

    Args:
        backend: "nccl" or "gloo"; None takes nccl on CUDA and gloo elsewhere.
        verbose: let DeepSpeed's own messages through.

    Raises:
        StartError: nccl was asked for on a machine without CUDA.
    """
    deepspeed.utils.logger.setLevel(logging.INFO if verbose else logging.ERROR)
    for handler in deepspeed.utils.logger.handlers:
        handler.setLevel(logging.INFO if verbose else logging.ERROR)
    device = _device()
    if backend == "nccl" and device.type != "cuda":
        raise StartError(
            "distributed_backend: nccl needs CUDA, and there is none here; write gloo, or leave "
            "the key out to let the device decide"
        )
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    # DeepSpeed compiles a shared-memory collective when it starts on a CPU, which takes a C++
    # compiler, ninja and most of a minute, and gloo does the same work. init_distributed builds it
    # only when this table says that the machine could.
    __compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized() and "RANK" not in os.environ:
        # A job of one needs no port: nothing to collide with on a shared machine.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    minutes = int(os.environ.get("DEEPSPEED_TIMEOUT", LONGEST_WAIT))
    deepspeed.init_distributed(
        dist_backend=backend,
        auto_mpi_discovery=False,
        verbose=verbose,
        timeout=timedelta(minutes=minutes),
    )
    return build_groups(device)


def stop() -> None:
    """Leave the job."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
