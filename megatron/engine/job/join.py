"""Join a job of processes, or start a job of one process.

Joining initialises torch.distributed and silences DeepSpeed's log. Importing this module imports
DeepSpeed, which takes seconds.
"""

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

from megatron import launcher, preemption
from megatron.config.sections.parallel import ParallelConfig
from megatron.ending import is_member
from megatron.engine.errors import StartError
from megatron.engine.job import failure
from megatron.parallel.groups import Groups, build_groups

LONGEST_WAIT = 60
"""A collective fails after this many minutes of waiting, unless DEEPSPEED_TIMEOUT is set.

DeepSpeed's default of 10 minutes can be too short while rank 0 converts a large checkpoint or
indexes a large text. A rank's failure still ends the job at once (see `failure`).
"""


@contextmanager
def joined_job(parallel: ParallelConfig, *, verbose: bool = False) -> Iterator[Groups]:
    """Join the job for the time of the `with` block, and yield its process groups.

    While the block runs, the failure of one rank ends all ranks.

    Args:
        parallel: The section of the config with `distributed_backend` and `heartbeat_timeout`.
        verbose: Whether DeepSpeed prints its log messages.
    """
    # After an error in a job of several processes, the process groups stay open, and the caller
    # must end the process.
    watch = failure.Watch(parallel.heartbeat_timeout, preemption.current.exchange)
    several = failed = is_member()
    try:
        groups = join_job(backend=parallel.distributed_backend, verbose=verbose)
        yield groups
        if several:
            groups.barrier()
        failed = False
    finally:
        if not failed:
            watch.stop()
            leave_job()


def join_job(*, backend: str | None = None, verbose: bool = False) -> Groups:
    """Join the job that torch's environment variables describe, and return its process groups.

    Without those variables, this process becomes a job of one process.

    Args:
        backend: "nccl" or "gloo"; None means nccl on CUDA and gloo elsewhere.
        verbose: Whether DeepSpeed prints its log messages.

    Raises:
        StartError: `backend` is "nccl" but the machine has no CUDA, or the job's port is in use.
    """
    for each in (deepspeed.utils.logger, *deepspeed.utils.logger.handlers):
        each.setLevel(logging.INFO if verbose else logging.ERROR)
    device = device_of_rank()
    if backend == "nccl" and device.type != "cuda":
        raise StartError(
            "distributed_backend: nccl needs CUDA, and there is none here; write gloo, or leave "
            "the key out to let the device decide"
        )
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    # On a CPU, `init_distributed` would compile a shared-memory collective. The compilation needs a
    # C++ compiler, ninja and most of a minute, and gloo does the same work. This entry prevents it.
    __compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized() and not is_member():
        # A job of one process needs no port, so jobs on a shared machine cannot collide.
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    os.environ.setdefault("LOCAL_RANK", "0")  # Kubernetes sets the other variables alone
    wait = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", LONGEST_WAIT)))
    try:
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=verbose, timeout=wait)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise StartError(
            f"port {os.environ['MASTER_PORT']} of this machine is in use by another program or "
            "job; set MASTER_PORT to another one"
        ) from None  # an error that the network caused would count as a lost contact
    # DeepSpeed's own groups, and ours, would have torch's shorter time.
    vars(deepspeed.comm.comm.cdb)["new_group"] = lambda ranks: dist.new_group(ranks, timeout=wait)
    return build_groups(device, wait)


def leave_job() -> None:
    """Close the process groups of this job. Every rank must call this function."""
    if dist.is_initialized():
        dist.destroy_process_group()


def device_of_rank() -> torch.device:
    """Return the device of this rank, which becomes the current device."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # srun can show each task only its own GPU, which is then the first, for DeepSpeed too.
    if torch.cuda.device_count() == 1 and "LOCAL_RANK" in os.environ:
        os.environ.setdefault(launcher.LOCAL_RANK, os.environ["LOCAL_RANK"])
        os.environ.update(LOCAL_RANK="0", OMPI_COMM_WORLD_LOCAL_RANK="0")  # they must be equal
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device
