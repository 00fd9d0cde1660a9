"""Write a checkpoint of a run, remove old checkpoints, and rename checkpoints of other runs.

If the process is killed, the previous checkpoint is still usable (see `publish`).
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import deepspeed
import torch

from megatron.engine.checkpoint.checksums import describe_files, write_record
from megatron.engine.checkpoint.publish import (
    UNFINISHED,
    create_unfinished,
    publish,
    why_not_written,
)
from megatron.engine.checkpoint.record import RunDescription, TrainingProgress
from megatron.engine.checkpoint.relayout import conversion_info
from megatron.engine.checkpoint.saved_checkpoints import Saved, finished
from megatron.engine.errors import CheckpointError, FailedElsewhereError
from megatron.engine.job.lease import Confirm, unleased
from megatron.parallel.groups import Groups
from megatron.parallel.rng import rng_state


@dataclass(frozen=True)
class Destination:
    """The folder in which a run saves checkpoints, and the rules for that folder.

    Attributes:
        folder: The run folder; a checkpoint becomes its subfolder `global_stepN`.
        run: The description of the run, which each checkpoint records.
        keep_last: The number of newest checkpoints to keep; None or 0 keeps all.
        confirm: A function that raises an error if another job has taken `folder` over.
    """

    folder: Path
    run: RunDescription
    keep_last: int | None = None
    confirm: Confirm = unleased


def write_state(
    engine: deepspeed.DeepSpeedEngine, groups: Groups, saved: Saved, to: Destination
) -> None:
    """Write the state of all ranks into the unfinished folder of the new checkpoint `saved`.

    Every rank must call this function, and `complete` afterwards.

    Raises:
        CheckpointError: The files cannot be written. Earlier checkpoints are unchanged.
    """
    # DeepSpeed writes the files through `engine.checkpoint_engine`, which the caller may replace.
    if groups.is_main:
        to.confirm()
        create_unfinished(to.folder, saved.tag)
    groups.barrier()
    client = {"universal_checkpoint_info": conversion_info(to.run)}
    unfinished = to.folder / f"{UNFINISHED}{saved.tag}"
    with removed_if_it_fails(saved):
        engine.save_checkpoint(str(to.folder), unfinished.name, client, save_latest=False)
        torch.save(rng_state(), unfinished / f"rng_rank_{groups.rank:05d}.pt")


@contextmanager
def removed_if_it_fails(saved: Saved) -> Iterator[None]:
    """Remove the unfinished files of `saved` if the `with` block fails.

    Raises:
        CheckpointError: The files could not be written.
        FailedElsewhereError: Another rank failed earlier, and has removed the files.
    """
    # An OSError or a RuntimeError of the block means that the files could not be written.
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch's file writer raises RuntimeErrors
        text = f"{saved.path} cannot be written ({why_not_written(saved.folder, error)}); "
        text += "checkpoints saved before are untouched"
        unfinished = saved.folder / f"{UNFINISHED}{saved.tag}"
        if not unfinished.exists():
            raise FailedElsewhereError(text) from error
        removed = unfinished.with_name(f"{unfinished.name}.failed")
        with suppress(OSError):  # renamed first, so that other ranks never find a part of it
            unfinished.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
        raise CheckpointError(text) from error


def complete(groups: Groups, saved: Saved, progress: TrainingProgress, to: Destination) -> None:
    """Publish the checkpoint `saved`, whose files are already written; remove old checkpoints.

    Every rank must call this function.

    Args:
        progress: The counters of the run, which the checkpoint records.
    """
    groups.barrier()
    unfinished = to.folder / f"{UNFINISHED}{saved.tag}"
    files = describe_files(unfinished, groups)
    if groups.is_main:
        with removed_if_it_fails(saved):
            write_record(unfinished, {"progress": asdict(progress), **asdict(to.run)}, files)
            set_aside_foreign(saved, to.run.lineage)
            publish(to.folder, saved.tag, to.confirm)
        prune(saved, to.keep_last, to.run.lineage, to.confirm)
    groups.barrier()


def set_aside_foreign(saved: Saved, lineage: str) -> None:
    """If another run wrote the checkpoint `saved`, set it aside: rename its folder.

    Args:
        saved: The checkpoint, which may be missing.
        lineage: The id of this run.
    """
    if saved.path.exists() and _lineage(saved) != lineage:
        aside = saved.path.with_name(f"{saved.tag}.of-another-run-{time.time_ns()}")
        saved.path.rename(aside)
        print(f"{saved.path} is not of this run: renamed to {aside.name}", flush=True)


def _lineage(saved: Saved) -> str | None:
    """Return the id of the run that wrote a checkpoint; None if it cannot be read."""
    # `kerple.json` records it.
    try:
        return saved.record.lineage
    except CheckpointError:
        return None


def prune(newest: Saved, keep_last: int | None, lineage: str, confirm: Confirm = unleased) -> None:
    """Remove old checkpoints of this run: keep the newest `keep_last`.

    Args:
        newest: The newest checkpoint, which is always kept.
        keep_last: The number of checkpoints to keep; None or 0 keeps all.
        lineage: The id of this run.
        confirm: A function that raises an error if another job has taken the run folder over.
    """
    # Checkpoints of later steps than `newest` are neither counted nor removed. Checkpoints of other
    # runs, checkpoints without a readable `kerple.json`, and published (GPT-NeoX) checkpoints are
    # never removed. `confirm` checks the lease (see `job/lease.py`).
    if not keep_last:
        return
    tags = finished(newest.folder)
    earlier = [each for each in tags[: tags.index(newest)] if _lineage(each) == lineage]
    for each in earlier[: max(0, len(earlier) + 1 - keep_last)]:
        confirm()
        # If the process is killed half-way, the next start removes the rest.
        removed = each.path.rename(each.folder / f"{UNFINISHED}{each.tag}")
        shutil.rmtree(removed, ignore_errors=True)
