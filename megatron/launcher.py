"""Find out which launcher started this process, join its job, or start one process for each GPU.

torchrun and the `deepspeed` launcher describe a job in the environment variables RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torch reads. srun and mpirun set other variables
instead, such as SLURM_PROCID. `join` computes torch's variables from those of srun or mpirun. A
process that srun or mpirun starts is called a task. Without `join`, each task would run as a
separate job, and all these jobs would write to the same folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import zlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from psutil import Process

_OF_MPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
LAUNCHERS = (
    # the launcher; its variables: rank, tasks, rank on this machine, tasks on this machine
    *(("mpirun", *(f"{mpi}_COMM_WORLD_{name}" for name in _OF_MPI)) for mpi in ("OMPI", "MV2")),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Without srun, a batch script sees SLURM_NTASKS too, but not the number of tasks of a step.
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""The variables that each launcher sets in the tasks that it starts.

mpirun comes before srun, because mpirun starts its helpers on other machines through srun. Tasks of
mpirun may therefore have the variables of both launchers.
"""
MASTER = ("MASTER_ADDR", "MASTER_PORT")
PORTS = range(20000, 32000)
"""A job without MASTER_PORT uses one of these ports. Linux itself assigns none of them."""
LOCAL_RANK = "KERPLE_LOCAL_RANK"
"""The variable with the rank on this machine, of a rank that sees one GPU and has LOCAL_RANK 0."""
SAVING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""`start_ranks` passes these signals on to the ranks, which then save a checkpoint and end."""

# This process's parent, the parent's parent and so on, up to the launcher. `join` sets it.
_launcher: list[Process] = []


class LaunchError(Exception):
    """The processes of a job cannot find each other. The message names the variables to set."""


class Task(NamedTuple):
    """A process that srun or mpirun started, described by its rank among the tasks of the job.

    Attributes:
        launcher: The name of the launcher, `srun` or `mpirun`.
        mark: The name of an environment variable that the launcher sets in each task.
        rank: The rank of this task among all tasks of the job.
        size: The number of all tasks of the job.
        local_rank: The rank of this task among the tasks on the same machine.
        local_size: The number of tasks on each machine, as the launcher's variable states it.
    """

    launcher: str
    mark: str  # the variable that the launcher sets in each task
    rank: int
    size: int
    local_rank: int
    local_size: str


def task() -> Task | None:
    """Describe this process as a task of srun or mpirun: its rank and the number of tasks.

    If the launcher started fewer than two tasks, or if the variable RANK is set, return None. In a
    shell that `srun --pty` started, WORLD_SIZE=1 has the same effect.
    """
    # torch reads the rank from RANK.
    if "RANK" in os.environ or (os.environ.get("WORLD_SIZE") == "1" and os.isatty(0)):
        return None
    for launcher, *names in LAUNCHERS:
        found = [os.environ.get(name, "") for name in names]
        if all(text.isdecimal() for text in found[:3]) and int(found[1]) > 1:
            rank, size, local_rank = map(int, found[:3])
            return Task(launcher, names[0], rank, size, local_rank, found[3])
    return None


def world_size() -> str:
    """Return the job's number of processes as text.

    The number is the value of WORLD_SIZE. If this variable is not set, the number is the number of
    tasks that srun or mpirun started. If neither of them started this process, the number is 1.
    """
    found = task()
    return os.environ.get("WORLD_SIZE") or str(found.size if found else 1)


def local_rank() -> int:
    """Return this process's rank among the job's processes on the same machine."""
    return int(os.environ.get(LOCAL_RANK) or os.environ.get("LOCAL_RANK") or "0")


def is_alone() -> bool:
    """Return whether this process runs without a launcher such as torchrun."""
    return task() is None and "RANK" not in os.environ and "WORLD_SIZE" not in os.environ


def stay_out() -> None:
    """Stay out of the launcher's job: remove the environment variable RANK."""
    # WORLD_SIZE is kept, so `world_size` still returns the job's number of processes.
    os.environ.pop("RANK", None)


def join() -> None:
    """Set torch's environment variables, so that this process can join its launcher's job.

    Call this function before any other code reads these variables.

    Raises:
        LaunchError: The processes of the job cannot find each other.
    """
    found = task()
    if found is None and world_size() != "1" and not {"RANK", *MASTER} <= os.environ.keys():
        stay_out()  # there is no store where this process could report the error
        raise LaunchError(
            f"error: WORLD_SIZE is {world_size()}, but RANK, MASTER_ADDR or MASTER_PORT is "
            "missing; start with torchrun, or unset WORLD_SIZE for one process"
        )
    mark = found.mark if found else "TORCHELASTIC_RUN_ID"
    _launcher[:] = _parents(mark)
    if found:
        address, port = _meeting_point(found, _job_of(found))
        os.environ.update(
            KERPLE_JOB=_job_of(found), RANK=str(found.rank), WORLD_SIZE=str(found.size),
            LOCAL_RANK=str(found.local_rank), MASTER_ADDR=address, MASTER_PORT=port,
        )  # fmt: skip


def launcher_has_ended() -> bool:
    """Return whether the launcher, or a process between it and this process, has ended."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return any(not p.is_running() or p.status() == "zombie" for p in _launcher)
    return True


def launcher_has_store() -> bool:
    """Return whether the launcher runs the job's key-value store.

    Only torchrun can do so. Otherwise, rank 0 runs the store.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def outlive_launcher() -> None:
    """Let this process outlive its launcher: `launcher_has_ended` returns False from now on."""
    # To be called when the process ends soon.
    _launcher.clear()


def start_ranks(count: int) -> int:
    """Start the current command in `count` processes (ranks); return the exit code of the job.

    All ranks run on this machine. While the ranks run, this process passes SIGINT, SIGTERM and
    SIGUSR1 on to them.
    """
    import psutil
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    def pass_on(number: int, _frame: object) -> None:
        ranks = psutil.Process().children()
        for rank in ranks:
            rank.send_signal(number)
        if not ranks:
            sys.exit(128 + number)

    for number in SAVING_SIGNALS:
        signal.signal(number, pass_on)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: the ranks share the cores
    options = ["--standalone", f"--nproc-per-node={count}", "--local-addr=localhost"]
    options.append("--signals-to-handle=SIGHUP,SIGQUIT")
    try:
        run(parse_args([*options, *sys.argv]))
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code  # negative: the number of a signal
    return 0


def _job_of(found: Task) -> str:
    """Return the launcher's name of the job, the same for all tasks, or "" if it is unknown."""
    # In a container, each task may have a launcher of its own, and see other processes.
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID") if found.launcher == "srun" else ("PMIX_NAMESPACE",)
    return ".".join(os.environ[name] for name in names if name in os.environ)


def _meeting_point(found: Task, job: str) -> tuple[str, str]:
    """Return the address and the port at which the tasks meet, the same for all tasks."""
    # These are the values of MASTER_ADDR (rank 0's machine) and MASTER_PORT.
    address, port = (os.environ.get(name) for name in MASTER)
    nodes = os.environ.get(f"SLURM_{'STEP' if found.launcher == 'srun' else 'JOB'}_NODELIST")
    if found.local_size == str(found.size):
        address = address or "127.0.0.1"
        job = job or str([process.pid for process in _launcher[-1:]])
    elif nodes:
        address = address or _first_host(nodes)
        job = job or os.environ["SLURM_JOB_ID"]
    elif not (address and port):
        if found.rank > 0:
            sys.exit(2)  # rank 0 says why
        raise LaunchError(
            f"error: {found.launcher} started {found.size} processes on several machines without "
            "saying where they meet; add -x MASTER_ADDR=HOST -x MASTER_PORT=29500 to Open MPI's "
            "mpirun, or -genv MASTER_ADDR HOST -genv MASTER_PORT 29500 to MPICH's and Intel's, "
            "where HOST is the machine of rank 0"
        )
    return address, port or str(PORTS[zlib.crc32(job.encode()) % len(PORTS)])


def _first_host(nodes: str) -> str:
    """Return the first host of Slurm's list of nodes, such as gpu07 for "gpu[07-10,12]"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group() if first else nodes)


def _parents(mark: str) -> list[Process]:
    """Return this process's parent, the parent's parent and so on, up to the launcher.

    Args:
        mark: The name of an environment variable that the launcher sets in each process.
    """
    # The launcher is the first ancestor without this variable. The list is empty if no launcher
    # started this process.
    import psutil

    parents, between = [], 0
    with contextlib.suppress(psutil.Error):  # other users' processes may be hidden
        parents = psutil.Process().parents()
        if parents and any("deepspeed.launcher.launch" in part for part in parents[0].cmdline()):
            return parents[:2]  # it would live on without the `deepspeed` command that started it
        while between < len(parents) and mark in parents[between].environ():
            between += 1
    return parents[: between + 1] if mark in os.environ else []
