"""Join a job of processes, or be a job of one: starts torch.distributed and silences DeepSpeed.

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
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]  documented

from megatron.engine.errors import StartError
from megatron.engine.job import failure
from megatron.parallel.groups import Groups, build_groups

LONGEST_WAIT = 60
"""Minutes that ranks wait for rank 0 while it converts checkpoints and indexes text, unless
DEEPSPEED_TIMEOUT is set. DeepSpeed's default of 10 is too short for large ones. The failure of a
rank is noticed at once anyway (`failure`)."""


@contextmanager
def joined_job(*, backend: str | None = None, verbose: bool = False) -> Iterator[Groups]:
    """Be a member of the job; the failure of one rank ends all of them.

    After an error in a job of several processes, its groups stay open, because all ranks would have
    to close them together. The caller then ends the process (`exit.user_errors`).
    """
    if not failure.is_member():
        try:
            yield join_job(backend=backend, verbose=verbose)
        finally:
            leave_job()
        return
    watch = failure.Watch()
    groups = join_job(backend=backend, verbose=verbose)
    yield groups
    groups.barrier()
    watch.stop()
    leave_job()


def join_job(*, backend: str | None = None, verbose: bool = False) -> Groups:
    """Join the job that the environment describes (torchrun's variables), or be a job of one.

    Args:
        backend: "nccl" or "gloo"; None takes nccl on CUDA and gloo elsewhere.
        verbose: show DeepSpeed's own messages.

    Raises:
        StartError: the config asks for nccl, and the machine has no CUDA.
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
    # On a CPU, DeepSpeed compiles a shared-memory collective at start. That takes a C++ compiler,
    # ninja and most of a minute, and gloo does the same work. init_distributed compiles it only if
    # this table says that the machine can.
    __compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized() and "RANK" not in os.environ:
        # A job of one needs no port, so nothing can collide with it on a shared machine.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    minutes = int(os.environ.get("DEEPSPEED_TIMEOUT", LONGEST_WAIT))
    deepspeed.init_distributed(
        dist_backend=backend,
        auto_mpi_discovery=False,
        verbose=verbose,
        timeout=timedelta(minutes=minutes),
    )
    return build_groups(device)


def leave_job() -> None:
    """Close the process groups; all ranks must call it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
