"""Checkpoints: DeepSpeed's files in a folder that appears whole or not at all.

    SAVE/global_stepN/          one checkpoint
        mp_rank_TT_*.pt, layer_*.pt, *_optim_states.pt    DeepSpeed's
        rng_rank_RRRRR.pt                                 dropout streams, one a rank
        kerple.json       layout, cuts, names of layers, progress, version, config
    SAVE/latest                 name of the newest whole checkpoint

A checkpoint is written as `.unfinished-global_stepN`, flushed to disk, renamed, and only then named
by `latest` (itself replaced by a rename): a process killed at any moment leaves the previous one
usable.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch

from megatron import __version__
from megatron.engine import weights
from megatron.parallel import Groups, rng_state, set_rng_state

UNFINISHED = ".unfinished-"


class CheckpointError(Exception):
    """A checkpoint that cannot be read or does not fit this run; the text says what to do."""


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
        CheckpointError: `latest` names a folder that is not there, or cannot be a tag.
    """
    latest = folder / "latest"
    if not latest.is_file():
        return None
    tag = latest.read_text().strip()
    if not tag or "/" in tag or not (folder / tag).is_dir():
        there = ", ".join(sorted(p.name for p in folder.glob("global_step*"))) or "none"
        raise CheckpointError(
            f"{latest} names {tag!r}, which is not a checkpoint folder beside it (there: {there}); "
            "write the name of one of those into it, or remove it to start afresh"
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
        about: JSON values kept beside the state (layout, data identity, resolved config).
        keep_last: remove all but this many newest checkpoints.

    Returns:
        The checkpoint's folder.
    """
    tag = tag_of(progress.step)
    unfinished, final = folder / f"{UNFINISHED}{tag}", folder / tag
    if groups.is_main:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    groups.barrier()
    engine.save_checkpoint(str(folder), tag=unfinished.name, save_latest=False)
    torch.save(rng_state(), unfinished / f"rng_rank_{groups.rank:05d}.pt")
    groups.barrier()
    if groups.is_main:
        record = {"version": __version__, "progress": asdict(progress), **about}
        (unfinished / "kerple.json").write_text(json.dumps(record, indent=1))
        for path in unfinished.iterdir():
            _flush(path)
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        _flush(folder)
        _replace_text(folder / "latest", tag)
        _prune(folder, keep_last, tag)
    groups.barrier()
    return final


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


def restore(
    engine: deepspeed.DeepSpeedEngine,
    groups: Groups,
    folder: Path,
    tag: str,
    *,
    layout: dict[str, Any],
    weights_only: bool = False,
) -> Progress:
    """Load weights, optimizer, schedule and random streams; every rank must call it.

    Args:
        layout: this run's layout; it must equal the checkpoint's, since the optimizer's state is
            cut over the ranks.
        weights_only: take the weights alone (`finetune`), whatever the layout.

    Raises:
        CheckpointError: unreadable, or written under another layout.
    """
    record = read_record(folder, tag)
    if weights_only:
        load_weights(engine.module, folder, tag, groups)
        refresh = getattr(engine.optimizer, "_restore_from_bit16_weights", None)
        if refresh is not None:
            refresh()
        return Progress(0, 0, 0)
    differing = [
        f"{key}: {record['layout'].get(key)!r} in the checkpoint, {value!r} here"
        for key, value in layout.items()
        if record["layout"].get(key) != value
    ]
    if differing:
        raise CheckpointError(
            f"{folder / tag} was written under another layout ({'; '.join(differing)}). Resume "
            "with the layout it was written under, or set `finetune: true` to take only its weights"
        )
    loaded, _ = engine.load_checkpoint(str(folder), tag=tag)
    if loaded is None:
        raise CheckpointError(f"{folder / tag}: DeepSpeed found nothing to load there")
    path = folder / tag / f"rng_rank_{groups.rank:05d}.pt"
    set_rng_state(torch.load(path, weights_only=True))
    return Progress(**record["progress"])


def read_weights(folder: Path, tag: str) -> dict[str, torch.Tensor]:
    """The model's whole state dict from a checkpoint of any ZeRO stage, without an engine.

    16-bit weights come as stored; ZeRO-3, where no rank holds them whole, gives the fp32 masters.
    """
    try:
        return weights.read_whole(folder, tag, read_record(folder, tag))
    except (OSError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{folder / tag}: its weights cannot be read ({error})") from error


def load_weights(model: torch.nn.Module, folder: Path, tag: str, groups: Groups) -> None:
    """Copy a checkpoint's weights into `model`, which must have the same parameters.

    Raises:
        CheckpointError: lists what is missing, unknown or of another shape.
    """
    stored = read_weights(folder, tag)
    wrong = weights.misfits(model, stored, groups)
    if wrong:
        listed = "\n  ".join(wrong)
        raise CheckpointError(
            f"{folder / tag} does not fit the model that the config describes:\n  {listed}\n"
            f"use the config it was trained with: {folder / 'config.yml'}"
        )
    weights.fill(model, stored)


def remove_unfinished(folder: Path) -> list[str]:
    """Delete what a killed run left half written; returns the names."""
    leftovers = sorted(folder.glob(f"{UNFINISHED}*"))
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in leftovers]


def _prune(folder: Path, keep_last: int | None, newest_tag: str) -> None:
    if not keep_last:
        return
    done = [p for p in folder.glob("global_step*") if p.name[len("global_step") :].isdigit()]
    done.sort(key=lambda p: int(p.name[len("global_step") :]))
    for path in done[:-keep_last]:
        if path.name != newest_tag:
            shutil.rmtree(path, ignore_errors=True)


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".unfinished")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    """fsync a file or a folder, so that a rename never outlives the bytes it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
