"""Checkpoints: DeepSpeed's files in a folder that appears whole or not at all.

    SAVE/global_stepN/          one checkpoint
        mp_rank_TT_*.pt, layer_*.pt, *_optim_states.pt    DeepSpeed's
        rng_rank_RRRRR.pt                                 dropout streams, one a rank
        kerple.json       layout, shapes, cuts, progress, version, config; sizes and checksums
    SAVE/latest                 name of the newest whole checkpoint

A process killed at any moment leaves the previous one usable: see `folders`.

DeepSpeed unpickles its files when a run resumes: load checkpoints of your own only.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.engine.checkpoint import full_weights as layout_weights
from megatron.engine.checkpoint import manifest
from megatron.engine.checkpoint.files import UNFINISHED, publish, why_not_written
from megatron.engine.errors import CheckpointError
from megatron.engine.neox.read import is_published
from megatron.engine.safe_load import safe_load
from megatron.parallel import Groups, rng_state, set_rng_state
from megatron.version import __version__

if TYPE_CHECKING:
    import deepspeed

UNSAID = {f"{kind}_parallel_size": 1 for kind in ("model", "pipe", "context")}
UNSAID["sub_group_size"] = None
"""What holds for layouts of checkpoints that do not say it."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come: all that the data order and the counters need.

    Attributes:
        step: optimizer steps done.
        consumed_samples: training samples read.
        train_samples: sample count that the training index was first built for; the published
            order depends on it, so a run keeps it for life.
    """

    step: int
    consumed_samples: int
    train_samples: int


def tag_of(step: int) -> str:
    """Folder name of the checkpoint after `step` steps."""
    return f"global_step{step}"


def newest(folder: Path) -> str | None:
    """Tag that `latest` names in `folder`; None where there is no checkpoint at all.

    Raises:
        CheckpointError: `latest` names a folder that is not there, or cannot be a tag; or `folder`
            is itself one of the checkpoints, not what holds them.
    """
    latest = folder / "latest"
    if not latest.is_file():
        if (folder / "kerple.json").is_file() or is_published(folder):
            raise CheckpointError(
                f"{folder} is one checkpoint; name the folder that holds it, {folder.parent}, with "
                f"a file `latest` in it that says {folder.name}"
            )
        return None
    tag = latest.read_text(errors="replace").strip()
    if not tag or "/" in tag or not (folder / tag).is_dir():
        there = ", ".join(sorted(p.name for p in folder.glob("global_step*"))) or "none"
        raise CheckpointError(
            f"{latest} names {tag!r}, which is not a checkpoint folder beside it (there: {there}); "
            "write the name of one of those into it, let train.py --allow-fallback take the newest "
            "whole one, or remove it to start afresh"
        )
    return tag


def save(
    engine: deepspeed.DeepSpeedEngine,
    groups: Groups,
    folder: Path,
    progress: Progress,
    *,
    about: dict[str, Any],
    keep_last: int | None = None,
) -> Path:
    """Write the state after `progress.step` steps; every rank must call it.

    Args:
        about: JSON values kept beside the state (layout, data identity, resolved config, and
            what `layout_weights.describe` says).
        keep_last: remove all but this many newest checkpoints.

    Returns:
        The checkpoint's folder.
    """
    from megatron.engine.checkpoint import (
        relayout as universal,  # it imports deepspeed, which reading does not need
    )

    tag = tag_of(progress.step)
    unfinished = folder / f"{UNFINISHED}{tag}"
    if groups.is_main:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    groups.barrier()
    client = {"universal_checkpoint_info": universal.conversion_info(about)}
    try:
        engine.save_checkpoint(str(folder), unfinished.name, client, save_latest=False)
        torch.save(rng_state(), unfinished / f"rng_rank_{groups.rank:05d}.pt")
    except (OSError, RuntimeError) as error:  # torch's writer raises the latter on a full disk
        raise CheckpointError(
            f"{folder / tag} cannot be written ({why_not_written(folder, error)}); checkpoints "
            "saved before are untouched"
        ) from error
    groups.barrier()
    files = manifest.describe_files(unfinished, groups)
    if groups.is_main:
        record = {"version": __version__, "progress": asdict(progress), **about, "files": files}
        (unfinished / manifest.RECORD).write_text(manifest.sealed(record))
        publish(folder, tag)
        _prune(folder, keep_last, tag)
    groups.barrier()
    return folder / tag


def finished(folder: Path) -> list[str]:
    """Tags of the checkpoints in `folder`, oldest first."""
    prefix = tag_of(0)[:-1]
    steps = [p.name[len(prefix) :] for p in folder.glob(f"{prefix}*")]
    return [tag_of(step) for step in sorted(int(step) for step in steps if step.isdigit())]


def read_record(folder: Path, tag: str) -> dict[str, Any]:
    """The checkpoint's `kerple.json`.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = folder / tag / "kerple.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error}); this folder was not written by this code, or it is "
            f"damaged: name another checkpoint in {folder / 'latest'}"
        ) from error


WAYS_OUT = {
    "model": "Use the config it was trained with, or another `load` and `save`",
    "data": (
        "Restore those settings to continue its order of samples exactly, or set `finetune: true` "
        "and another `save` to start a new run from its weights"
    ),
}
"""What a checkpoint must agree with a run about, and what to do where it does not."""


def require_same(folder: Path, tag: str, about: dict[str, dict[str, Any]]) -> None:
    """Compare `about` (any of model, data) with what the checkpoint says of itself.

    Raises:
        CheckpointError: names every entry that differs.
    """
    record = read_record(folder, tag)
    for subject, here in about.items():
        there = record.get(subject, {})
        here = json.loads(json.dumps(here))  # as it would be read back
        differing = [
            f"{key}: {there.get(key)!r} in the checkpoint, {value!r} here"
            for key, value in here.items()
            if there.get(key) != value
        ]
        if differing:
            raise CheckpointError(
                f"{folder / tag} was written with another {subject} ({'; '.join(differing)}). "
                f"{WAYS_OUT[subject]}"
            )


def restore(
    engine: deepspeed.DeepSpeedEngine,
    groups: Groups,
    folder: Path,
    tag: str,
    about: dict[str, Any],
    work: Path,
) -> Progress:
    """Load weights, optimizer, schedule and random streams; every rank must call it.

    Args:
        about: this run's layout and cuts. Where they are not the checkpoint's, the main rank
            converts the checkpoint first; the random streams of dropout then start anew.
        work: folder to convert it in; `folder` may be another run's, or read-only.

    Raises:
        CheckpointError: a file is missing or damaged, or the layouts cannot be converted.
    """
    from megatron.engine.checkpoint import relayout as universal

    record = read_record(folder, tag)
    progress, written = Progress(**record["progress"]), UNSAID | record["layout"]
    layout, cuts = about["layout"], about["cuts"]
    recut = layout["model_parallel_size"] > 1 and record.get("cuts", cuts) != cuts
    if written != layout or recut:
        why = universal.refusal(written, layout)
        if why:
            raise CheckpointError(
                f"{folder / tag} was written with another layout, and {why}. Resume with the "
                "layout it was written under, or set `finetune: true` and another `save` to take "
                "only its weights"
            )
        other = [f"{k} {written[k]} -> {v}" for k, v in layout.items() if written[k] != v]
        changed = ", ".join(other) or "weights cut otherwise"
        scratch = work / f"{UNFINISHED}universal"
        universal.restore(engine, groups, folder / tag, scratch, record, cuts, changed)
        return progress
    try:
        loaded, _ = engine.load_checkpoint(str(folder), tag=tag)
        path = folder / tag / f"rng_rank_{groups.rank:05d}.pt"
        set_rng_state(torch.load(path, weights_only=True))
    except Exception as error:  # whatever a torn file makes the readers below it raise
        raise CheckpointError(
            f"{folder / tag}: cannot be loaded on rank {groups.rank} "
            f"({type(error).__name__}: {error}); if a file is damaged, write the name of an older "
            f"checkpoint into {folder / 'latest'}"
        ) from error
    if loaded is None:
        raise CheckpointError(f"{folder / tag}: DeepSpeed found nothing to load there")
    return progress


def read_weights(folder: Path, tag: str) -> dict[str, torch.Tensor]:
    """The model's whole state dict from a checkpoint of any ZeRO stage, without an engine.

    16-bit weights come as stored; ZeRO-3, where no rank holds them whole, gives the fp32 masters.
    """
    return layout_weights.read_whole(folder, tag, read_record(folder, tag))


def is_foreign(folder: Path, tag: str) -> bool:
    """Whether the checkpoint is a published one, or was imported from one."""
    return is_published(folder / tag) or "imported" in read_record(folder, tag)


def imported_rest(
    folder: Path, tag: str
) -> tuple[dict[str, torch.Tensor], dict[str, list[torch.Tensor]]]:
    """(buffers, parts) of an imported checkpoint, as in `neox_checkpoint.Published`."""
    if not is_foreign(folder, tag):
        return {}, {}
    state = safe_load(folder / tag / "mp_rank_00_model_states.pt")
    return state["neox_buffers"], state.get("neox_parts", {})


def _prune(folder: Path, keep_last: int | None, newest_tag: str) -> None:
    """Remove all but the `keep_last` newest checkpoints of this run.

    Those beyond the newest one come from a run that went back behind them; they are not counted,
    for they may be what it went back from.
    """
    if not keep_last:
        return
    tags = finished(folder)
    ours = [each for each in tags if (folder / each / manifest.RECORD).is_file()]
    past = [each for each in ours if tags.index(each) < tags.index(newest_tag)]
    for each in past[: max(0, len(past) + 1 - keep_last)]:
        going = folder / f"{UNFINISHED}{each}"  # killed half-way, the next start removes the rest
        (folder / each).rename(going)
        shutil.rmtree(going, ignore_errors=True)
