"""Write a checkpoint, and remove old ones (`keep_last_n_checkpoints`).

If the process is killed at any moment, the previous checkpoint stays usable (see `publish`).
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import deepspeed
import torch

from megatron.engine.checkpoint.checksums import RECORD, describe_files, sealed
from megatron.engine.checkpoint.publish import (
    UNFINISHED,
    create_unfinished,
    publish,
    why_not_written,
)
from megatron.engine.checkpoint.record import RunDescription, TrainingProgress
from megatron.engine.checkpoint.relayout import conversion_info
from megatron.engine.checkpoint.saved import Saved, finished, tag_of
from megatron.engine.errors import CheckpointError
from megatron.parallel.groups import Groups
from megatron.parallel.rng import rng_state
from megatron.version import __version__


def save(
    engine: deepspeed.DeepSpeedEngine,
    groups: Groups,
    folder: Path,
    progress: TrainingProgress,
    run: RunDescription,
    *,
    keep_last: int | None = None,
) -> Saved:
    """Write a checkpoint after `progress.step` steps. Every rank must call this function.

    Args:
        folder: the run folder; the checkpoint becomes its subfolder `global_stepN`.
        progress: the counters of the run, which the checkpoint records.
        run: the description of the run, which the checkpoint records.
        keep_last: the number of newest checkpoints to keep; None keeps all.

    Raises:
        CheckpointError: the checkpoint cannot be written. Earlier checkpoints are unchanged.
    """
    saved = Saved(folder, tag_of(progress.step))
    unfinished = folder / f"{UNFINISHED}{saved.tag}"
    if groups.is_main:
        create_unfinished(folder, saved.tag)
    groups.barrier()
    client = {"universal_checkpoint_info": conversion_info(run)}
    try:
        engine.save_checkpoint(str(folder), unfinished.name, client, save_latest=False)
        torch.save(rng_state(), unfinished / f"rng_rank_{groups.rank:05d}.pt")
    except (OSError, RuntimeError) as error:  # torch's writer raises the latter on a full disk
        raise CheckpointError(
            f"{saved.path} cannot be written ({why_not_written(folder, error)}); checkpoints "
            "saved before are untouched"
        ) from error
    groups.barrier()
    files = describe_files(unfinished, groups)
    if groups.is_main:
        record = {"version": __version__, "progress": asdict(progress), **asdict(run)}
        (unfinished / RECORD).write_text(sealed(record | {"files": files}))
        publish(folder, saved.tag)
        prune(saved, keep_last)
    groups.barrier()
    return saved


def prune(newest: Saved, keep_last: int | None) -> None:
    """Remove old checkpoints: keep `newest` and the `keep_last` - 1 checkpoints before it.

    Checkpoints of later steps than `newest` are neither counted nor removed. They exist if the run
    went back to an earlier step, for example because later checkpoints were damaged. Checkpoints in
    the published (GPT-NeoX) layout are not removed either.

    Args:
        keep_last: the number of checkpoints to keep; None or 0 keeps all.
    """
    if not keep_last:
        return
    tags = finished(newest.folder)
    earlier = [each for each in tags[: tags.index(newest)] if (each.path / RECORD).is_file()]
    for each in earlier[: max(0, len(earlier) + 1 - keep_last)]:
        # If the process is killed half-way, the next start removes the rest.
        removed = each.path.rename(each.folder / f"{UNFINISHED}{each.tag}")
        shutil.rmtree(removed, ignore_errors=True)
