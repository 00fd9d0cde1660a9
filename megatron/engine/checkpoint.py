"""Checkpoints: DeepSpeed's files in a folder that appears whole or not at all.

    SAVE/global_stepN/          one checkpoint
        mp_rank_00_model_states.pt, *_optim_states.pt     DeepSpeed's
        rng_rank_RRRRR.pt                                 dropout streams, one a rank
        kerple.json                                       layout, progress, versions, config
    SAVE/latest                 name of the newest whole checkpoint

A checkpoint is written as `.unfinished-global_stepN`, flushed to disk, renamed, and only then named
by `latest` (itself replaced by a rename): a process killed at any moment leaves the previous one
usable. An older folder of the same name is put aside first and deleted last.

DeepSpeed unpickles its files when a run resumes: load checkpoints of your own only.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch

from megatron import __version__
from megatron.parallel import Groups, rng_state, set_rng_state

UNFINISHED, REPLACED = ".unfinished-", ".replaced-"


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
        for path in (*unfinished.iterdir(), unfinished):
            _flush(path)
        aside = folder / f"{REPLACED}{tag}"
        if final.exists():
            final.rename(aside)
        unfinished.rename(final)
        _flush(folder)
        _replace_text(folder / "latest", tag)
        shutil.rmtree(aside, ignore_errors=True)
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


WAYS_OUT = {
    "model": "Use the config it was trained with, or another `load` and `save`",
    "data": (
        "Restore those settings to continue its order of samples exactly, or set `finetune: true` "
        "and another `save` to start a new run from its weights"
    ),
    "layout": (
        "Resume with the layout it was written under, or set `finetune: true` and another `save` "
        "to take only its weights"
    ),
}
"""What a checkpoint must agree with a run about, and what to do where it does not."""


def require_same(folder: Path, tag: str, about: dict[str, dict[str, Any]]) -> None:
    """Compare `about` (any of model, data, layout) with what the checkpoint says of itself.

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
    engine: deepspeed.DeepSpeedEngine, groups: Groups, folder: Path, tag: str
) -> Progress:
    """Load weights, optimizer, schedule and random streams; every rank must call it.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    progress = Progress(**read_record(folder, tag)["progress"])
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
    record = read_record(folder, tag)
    if record["layout"]["zero_stage"] == 3:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return get_fp32_state_dict_from_zero_checkpoint(str(folder), tag=tag)
    path = folder / tag / "mp_rank_00_model_states.pt"
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)["module"]
    except (OSError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def load_weights(model: torch.nn.Module, folder: Path, tag: str) -> None:
    """Copy a checkpoint's weights into `model`, which must have the same parameters.

    Raises:
        CheckpointError: lists what is missing, unknown or of another shape.
    """
    stored = read_weights(folder, tag)
    own = model.state_dict()
    wrong = [f"{name}: missing in the checkpoint" for name in own.keys() - stored.keys()]
    wrong += [f"{name}: not in this model" for name in stored.keys() - own.keys()]
    wrong += [
        f"{name}: {tuple(stored[name].shape)} in the checkpoint, {tuple(own[name].shape)} here"
        for name in own.keys() & stored.keys()
        if stored[name].shape != own[name].shape
    ]
    if wrong:
        listed = "\n  ".join(sorted(wrong))
        raise CheckpointError(
            f"{folder / tag} does not fit the model that the config describes:\n  {listed}\n"
            f"use the config it was trained with: {folder / 'config.yml'}"
        )
    model.load_state_dict(stored)


def remove_unfinished(folder: Path) -> list[str]:
    """Delete what a killed run left half written or half replaced; returns the names."""
    for aside in folder.glob(f"{REPLACED}*"):
        final = folder / aside.name.removeprefix(REPLACED)
        if not final.exists():  # killed between the two renames: the old one is still the newest
            aside.rename(final)
    leftovers = sorted([*folder.glob(f"{UNFINISHED}*"), *folder.glob(f"{REPLACED}*")])
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
