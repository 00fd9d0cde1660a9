"""Check the machine: processor, limits, disks and names."""

import os
import re
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from megatron.files import existing, why_unwritable
from tools.checkup.finding import PROBLEM, WARNING, Case, Finding, judged

FEWEST_FILES = 1024
"""The smallest accepted limit of open files. A process opens shards, checkpoints and sockets."""
LEAST_DISK, SMALL_DISK, LEAST_SHM = 1e9, 20e9, 1e9
_SHARED = re.compile(r"nfs|lustre|gpfs|beegfs|ceph|gluster|cifs|smb|wekafs|panfs|pvfs|orangefs|afs")


def cpu(case: Case) -> Iterator[Finding]:
    flags = re.findall(r"avx512_bf16|amx_bf16|avx512f|avx2", Path("/proc/cpuinfo").read_text())
    best = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags]
    text = f"{len(os.sched_getaffinity(0))} cores, {', '.join(best) or 'no AVX2'}"
    slow = not case.gpu and not {"amx_bf16", "avx512_bf16"} & set(best)
    bf16 = case.config is not None and case.config.training.precision == "bf16"
    if slow:
        text += "; bf16 is much slower than fp32 on it"
    yield judged(slow and bf16, text, "write `precision: fp32`", WARNING)


def threads(case: Case) -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    given, policy = os.environ.get("OMP_NUM_THREADS"), os.environ.get("OMP_WAIT_POLICY", "PASSIVE")
    text = f"OMP_NUM_THREADS={given or f'unset ({cores} threads)'}, {here} processes"
    number = given.partition(",")[0] if given else str(cores)  # OpenMP also takes 4,2
    many = not number.isdecimal() or int(number) * here > cores
    yield judged(many, text, f"export OMP_NUM_THREADS={max(1, cores // here)}", WARNING)
    remedy = "unset OMP_WAIT_POLICY: threads that spin make a busy machine much slower"
    yield judged(policy.upper() == "ACTIVE", f"OMP_WAIT_POLICY={policy}", remedy, WARNING)


def open_files(case: Case) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"limit {soft:,} (at most {hard:,})"
    remedy = "ulimit -n 65536, or LimitNOFILE= of the service, or docker's --ulimit nofile=65536"
    yield judged(0 <= soft < FEWEST_FILES, text, remedy)


def disk(case: Case) -> Iterator[Finding]:
    """Check the disk space and permissions of the run folder.

    If the run folder does not exist, check its nearest ancestor that exists.
    """
    folder = existing(case.folder)
    free, kind = shutil.disk_usage(folder).free, _file_system(folder)
    remedy = "free space, or name another `save`; a checkpoint takes about 14 bytes per parameter"
    text = f"{folder}: {free / 1e9:,.1f} GB free"
    yield judged(free < SMALL_DISK, text, remedy, PROBLEM if free < LEAST_DISK else WARNING)
    files = os.statvfs(folder)
    none = files.f_files > 0 and files.f_favail == 0
    yield judged(none, f"{folder}: {files.f_favail:,} inodes free", "remove files there")
    why = why_unwritable(folder)
    remedy = f"chown or chmod {folder}, or name another `save`"
    yield judged(why, f"{folder}: {why or 'writable'}", remedy)
    shared = bool(_SHARED.search(kind))
    text = f"{folder}: {kind}, {'shared' if shared else 'local to this machine'}"
    remedy = "all machines of a job must see one `save`: name a folder on a shared file system"
    yield judged(case.several and not shared, text, remedy)


def _file_system(folder: Path) -> str:
    """Return the type of the file system of `folder`, such as ext4 or nfs4."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    place = folder.resolve()
    found = [(len(point), kind) for point, kind in mounts if place.is_relative_to(point)]
    return max(found, default=(0, "unknown"))[1]


def shared_memory(case: Case) -> Iterator[Finding]:
    total = shutil.disk_usage("/dev/shm").total
    remedy = "docker run --ipc=host, or --shm-size=8g; Kubernetes: a memory volume at /dev/shm"
    level = PROBLEM if case.gpu or case.ranks > 1 else WARNING
    text = f"/dev/shm has {total / 1e6:,.0f} MB; NCCL and data loaders share memory there"
    yield judged(total < LEAST_SHM, text, remedy, level)


def names(case: Case) -> Iterator[Finding]:
    """Check that the names of this machine and of rank 0's machine resolve to network addresses."""
    own, master = socket.gethostname(), os.environ.get("MASTER_ADDR")
    for name in dict.fromkeys((own, master) if master else (own,)):
        address = _address(name)
        text = f"{name} is {address or 'not resolved'}"
        remedy = f"write the address of {name} into /etc/hosts, or set MASTER_ADDR to an address"
        level = PROBLEM if name == master or case.several else WARNING
        here = case.several and str(address).startswith(("127.", "::1"))
        yield judged(not address or here, text, remedy, level)


def _address(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return None
