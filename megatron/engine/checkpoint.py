"""Checkpoints: DeepSpeed's files in a folder that appears whole or not at all.

    SAVE/global_stepN/          one checkpoint
        mp_rank_00_model_states.pt, *_optim_states.pt     DeepSpeed's
        rng_rank_RRRRR.pt                                 dropout streams, one a rank
        kerple.json                                       layout, progress, versions, config
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

from megatron import __version__
from megatron.engine.folders import UNFINISHED, publish
from megatron.engine.neox_checkpoint import is_published
from megatron.engine.safe_load import CheckpointError, safe_load
from megatron.parallel import Groups, rng_state, set_rng_state

if TYPE_CHECKING:
    import deepspeed

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
        publish(folder, tag)
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
    return safe_load(folder / tag / "mp_rank_00_model_states.pt")["module"]


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
    if not keep_last:
        return
    done = [path.parent for path in folder.glob("global_step*/kerple.json")]  # ours alone
    done = [p for p in done if p.name[len("global_step") :].isdigit()]
    done.sort(key=lambda p: int(p.name[len("global_step") :]))
    for path in done[:-keep_last]:
        if path.name != newest_tag:
            shutil.rmtree(path, ignore_errors=True)
