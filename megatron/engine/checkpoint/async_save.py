"""Save checkpoints of a run; if `async_save` is set, a thread writes them while training continues.

    synchronous     write the files, publish the checkpoint, continue training
    asynchronous    copy the state into a buffer, continue training; a thread writes and publishes

Both ways write the same bytes. The thread holds Python's global lock (GIL) only briefly, because
torch writes tensors without this lock. The thread's collectives use a separate process group,
because training's collectives run at the same time. A save begins only when the previous save is
complete, so one buffer is enough. If a process is killed during a save, an unfinished folder
remains, and `latest` still names the previous checkpoint (see `publish`).
"""

from __future__ import annotations

import copy
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import deepspeed
import numpy as np
import psutil
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.engine.checkpoint.record import TrainingProgress
from megatron.engine.checkpoint.saved_checkpoints import Saved
from megatron.engine.checkpoint.write import Destination, complete, removed_if_it_fails, write_state
from megatron.parallel.groups import Groups
from megatron.run_folder import tag_of

ALIGNMENT = 64
"""The storage of each tensor starts in the buffer at a multiple of this number of bytes."""
SLOW_SAVE = 25
"""If a save takes more seconds than this, the log warns that a launcher could kill the job."""
SHARE = 0.9
"""The part of a machine's free memory that staging buffers may take."""
LONGEST_WRITE = timedelta(hours=2)
"""A rank that has written its files of a checkpoint waits this long for the other ranks."""

Files = list[tuple[Any, str]]
"""Pairs (state, path) for `torch.save`."""


class Saver:
    """Saves the checkpoints of one run. All ranks must call the methods in the same order.

    Args:
        beside_training: Whether a thread writes the files while training continues.
        say: A function that prints a line on rank 0.
    """

    def __init__(
        self,
        engine: deepspeed.DeepSpeedEngine,
        groups: Groups,
        to: Destination,
        *,
        beside_training: bool,
        say: Callable[[str], None],
    ):
        self._engine, self._groups, self._to, self._say = engine, groups, to, say
        self._beside = beside_training
        self._writer: Any = engine.checkpoint_engine  # DeepSpeed sets it after construction
        self._buffer: Buffer | None = None
        self._writing: tuple[Saved, Future[float]] | None = None
        self._warned = False
        if beside_training:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
            self._own = groups
            if groups.world_size > 1:
                job = dist.new_group(backend="gloo", timeout=LONGEST_WRITE)
                self._own = replace(groups, job=job)

    def save(self, progress: TrainingProgress) -> None:
        """Wait until the previous checkpoint is written. Then save a new one.

        Args:
            progress: The counters of the run, which the checkpoint records.

        Raises:
            CheckpointError: This checkpoint or the previous one cannot be written.
        """
        # With a thread, this method only copies the state, and the thread writes the files.
        begun = time.monotonic()
        self.wait()
        saved = Saved(self._to.folder, tag_of(progress.step))
        # At step 0, Adam has no moments yet, so the buffer would be too small for later steps.
        if self._beside and progress.step:
            files = self._collected(saved)
            if buffer := self._buffer_for(files):
                staged = buffer.stage(files)
                future = self._thread.submit(self._write, staged, saved, progress)
                self._writing = saved, future
        if not self._writing:
            write_state(self._engine, self._groups, saved, self._to)
            complete(self._groups, saved, progress, self._to)
        seconds = time.monotonic() - begun
        word = "saving" if self._writing else "saved"
        self._say(f"  {word} {saved.path}, training waited {seconds:.2f} s")
        self._warn_if_slow(seconds)

    def check(self) -> None:
        """Print how long the last save took, if the thread has completed it since the last call.

        Raises:
            CheckpointError: The thread could not write the checkpoint.
        """
        if not self.writes():
            self.wait()

    def writes(self) -> bool:
        """Return whether the saver's thread is writing a checkpoint."""
        return self._writing is not None and not self._writing[1].done()

    def wait(self) -> None:
        """Wait until the saver's thread has completed the current save, if there is one.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        if self._writing is not None:
            (saved, future), self._writing = self._writing, None
            seconds = future.result()
            self._say(f"  saved {saved.path}, written beside training in {seconds:.1f} s")
            self._warn_if_slow(seconds)

    def _warn_if_slow(self, seconds: float) -> None:
        if seconds > SLOW_SAVE and not self._warned:
            self._warned = True
            self._say(
                "  a launcher that kills 30 s after its signal, as torchrun does, would cut such a "
                "save; let the scheduler signal earlier (docs/resuming.md)"
            )

    def _collected(self, saved: Saved) -> Files:
        """Return (state, path) of each file that DeepSpeed would write for this checkpoint."""
        # The state is not copied.
        files: Any = Collector()
        self._engine.checkpoint_engine = files
        try:
            write_state(self._engine, self._groups, saved, self._to)
        finally:
            self._engine.checkpoint_engine = self._writer
        return files.found

    def _buffer_for(self, files: Files) -> Buffer | None:
        """Return the buffer for copies of the state, or None if there is too little memory."""
        # The first call allocates the buffer. If some machine has too little memory for the buffers
        # of its ranks, this save and all later ones are synchronous.
        if self._buffer is None:
            size = buffer_size(files)
            ranks = self._groups.gather_from_job((socket.gethostname(), size, free_memory()))
            for host in {name for name, *_ in ranks}:
                needed = sum(size for name, size, _ in ranks if name == host)
                free = min(free for name, _, free in ranks if name == host)
                if needed > SHARE * free:
                    self._beside = False
                    self._say(
                        f"async_save: staging buffers of {needed / 1e9:,.2f} GB do not fit into "
                        f"the {free / 1e9:,.2f} GB that are free on {host}; saving is synchronous"
                    )
                    return None
            self._buffer = Buffer(size, pinned=self._groups.device.type == "cuda")
            self._say(f"async_save: staging buffer of {size / 1e9:,.2f} GB on each rank")
        return self._buffer

    def _write(self, staged: Files, saved: Saved, progress: TrainingProgress) -> float:
        """Write and publish a checkpoint. Return the seconds taken."""
        # Runs in the saver's thread.
        begun, writer = time.monotonic(), self._writer
        with removed_if_it_fails(saved):
            for state, path in staged:
                writer.save(state, path)
        complete(self._own, saved, progress, self._to)
        return time.monotonic() - begun


class Collector(TorchCheckpointEngine):
    """A checkpoint engine for DeepSpeed that lists each file instead of writing it."""

    # The list `found` holds (state, path).

    def __init__(self) -> None:
        super().__init__()
        self.found: Files = []

    def save(self, state_dict: Any, path: str) -> None:
        self.found.append((state_dict, path))


class Buffer:
    """A block of memory for a copy of a checkpoint.

    Args:
        size: The number of bytes of the block.
        pinned: Whether the block is page-locked, so that a GPU can copy into it directly.
    """

    # All checkpoints of a run use the same block.

    def __init__(self, size: int, *, pinned: bool = False):
        self._bytes = np.empty(size, np.uint8)  # in pages of 2 MB, which are touched much faster
        self._bytes.fill(0)
        if pinned and size:  # torch's own pinned memory would have a power of two as its size
            cast(Any, torch.cuda.cudart()).cudaHostRegister(self._bytes.ctypes.data, size, 0)

    def stage(self, files: Files) -> Files:
        """Copy the state in `files` into the buffer, and return `files` with the copied state."""
        # Tensors that share a storage also share a storage in the copy. State that does not fit
        # into the buffer is copied into other memory.
        copies, start = {}, 0
        for key, storage in _storages(files).items():
            size = storage.nbytes()
            if size and start + size <= len(self._bytes):
                target = torch.from_numpy(self._bytes[start : start + size])
                source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                target.copy_(source, non_blocking=True)
                copies[key] = target.untyped_storage()
                start += _aligned(size)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        memo: dict[int, Any] = {}
        found = [each for each in _tensors(files) if _key(each.untyped_storage()) in copies]
        for tensor in found:
            memo[id(tensor)] = _same_view(tensor, copies[_key(tensor.untyped_storage())])
        for tensor in found:  # ZeRO-3 gives its tensors attributes, which `torch.save` writes
            vars(memo[id(tensor)]).update(copy.deepcopy(vars(tensor), memo))
        return copy.deepcopy(files, memo)


def buffer_size(files: Files) -> int:
    """Return the number of bytes that a buffer needs to hold the tensors in `files`."""
    return sum(_aligned(each.nbytes()) for each in _storages(files).values())


def _storages(files: Files) -> dict[int, torch.UntypedStorage]:
    """Return a dict from integer key to storage, with each storage in `files` once."""
    return {_key(each): each for each in (t.untyped_storage() for t in _tensors(files))}


def free_memory(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of bytes that this machine's or container's processes can still allocate.

    Args:
        group: The folder of the control group, whose memory may be limited.
    """
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError, KeyError):  # there is no limit
        most, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, most - used + int(stat["file"]) - int(stat["shmem"]))
    return free


def _tensors(files: Files) -> list[Tensor]:
    return [each for each in tree_leaves(files) if isinstance(each, Tensor)]


def _key(storage: torch.UntypedStorage) -> int:
    return storage._cdata


def _same_view(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a tensor of the same shape, strides and offset as `tensor`, with data in `storage`."""
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(view, tensor.requires_grad)
    return view.requires_grad_(tensor.requires_grad)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
