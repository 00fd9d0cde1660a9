"""Checkpoints on disk: `Saved` is one, `newest` and `finished` find those of a run folder.

    RUN/global_stepN/           one checkpoint
        mp_rank_TT_*.pt, layer_*.pt, *_optim_states.pt    DeepSpeed's
        rng_rank_RRRRR.pt                                 random streams of dropout, one per rank
        kerple.json                                       `Record`
    RUN/latest                  name of the newest complete checkpoint

A folder may also hold published checkpoints, or checkpoints imported from them (`Kind`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.engine.checkpoint import checksums
from megatron.engine.checkpoint.full_weights import Weights, read_full
from megatron.engine.checkpoint.record import Record, RunDescription
from megatron.engine.errors import CheckpointError
from megatron.engine.neox.counters import counters
from megatron.engine.neox.read import is_published
from megatron.engine.safe_load import safe_load
from megatron.parallel.groups import Groups


class Kind(Enum):
    """Where a checkpoint comes from."""

    OURS = "written by this code"
    IMPORTED = "a published checkpoint, imported into our layout"
    PUBLISHED = "in the published layout"


ADVICE = {
    "model": "Use the config it was trained with, or another `load` and `save`",
    "data": (
        "Restore those settings to continue its order of samples exactly, or set `finetune: true` "
        "and another `save` to start a new run from its weights"
    ),
}
"""Fields of `RunDescription` that a resumed run must not change -> the remedy if they differ."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk. Its files are read on first use.

    Attributes:
        folder: the run folder.
        tag: name of the checkpoint's folder in it, `global_stepN`.
    """

    folder: Path
    tag: str

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.folder / self.tag

    @cached_property
    def record(self) -> Record:
        """Its `kerple.json`; a published checkpoint has none.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        return Record.read(self.path)

    @cached_property
    def kind(self) -> Kind:
        """Where it comes from."""
        if is_published(self.path):
            return Kind.PUBLISHED
        return Kind.OURS if self.record.imported is None else Kind.IMPORTED

    @cached_property
    def counters(self) -> tuple[int, dict[str, Any] | None]:
        """(optimizer steps done, learning-rate curve that a published run recorded or None)."""
        if self.kind is Kind.PUBLISHED:
            return counters(self.path)
        return self.record.progress.step, (self.record.imported or {}).get("schedule")

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.counters[0]

    def weights(self) -> Weights:
        """Every unsharded weight by name, without an engine; not of a published checkpoint.

        16-bit weights come as stored. ZeRO-3 stores no unsharded ones: its fp32 masters are joined.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        return read_full(self.path, self.record)

    def imported_tensors(self) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        """(buffers, shards) of an imported checkpoint, see `Published`; otherwise both empty."""
        if self.kind is not Kind.IMPORTED:
            return {}, {}
        state = safe_load(self.path / "mp_rank_00_model_states.pt")
        return state["neox_buffers"], state.get("neox_parts", {})

    def damage(self, groups: Groups) -> str | None:
        """The first damaged file, and how it is damaged; None if all are intact.

        Every rank must call it. The published format has neither sizes nor checksums to compare.
        """
        return None if is_published(self.path) else checksums.damage(self.path, groups)

    def require_same(self, run: RunDescription, *subjects: str) -> None:
        """Compare these fields of `run` (keys of `ADVICE`) with the record.

        Raises:
            CheckpointError: names every entry that differs.
        """
        for subject in subjects:
            there = getattr(self.record, subject)
            here = json.loads(json.dumps(getattr(run, subject)))  # as it would be read back
            differing = [
                f"{key}: {there.get(key)!r} in the checkpoint, {value!r} here"
                for key, value in here.items()
                if there.get(key) != value
            ]
            if differing:
                raise CheckpointError(
                    f"{self.path} was written with another {subject} ({'; '.join(differing)}). "
                    f"{ADVICE[subject]}"
                )


def tag_of(step: int) -> str:
    """Folder name of the checkpoint after `step` steps."""
    return f"global_step{step}"


def finished(folder: Path) -> list[Saved]:
    """The checkpoints in `folder`, oldest first."""
    prefix = tag_of(0)[:-1]
    steps = [path.name[len(prefix) :] for path in folder.glob(f"{prefix}*")]
    return [Saved(folder, tag_of(step)) for step in sorted(int(s) for s in steps if s.isdigit())]


def newest(folder: Path) -> Saved | None:
    """The checkpoint that `latest` names in `folder`; None if there is no checkpoint.

    Raises:
        CheckpointError: see `find_newest`.
    """
    saved, problem = find_newest(folder)
    if problem:
        raise CheckpointError(problem)
    return saved


def find_newest(folder: Path) -> tuple[Saved | None, str]:
    """(the checkpoint that `latest` names in `folder` or None, what is wrong).

    Wrong is a `latest` that names no folder beside it, and a `folder` that is itself a checkpoint.
    """
    latest = folder / "latest"
    if not latest.is_file():
        if (folder / checksums.RECORD).is_file() or is_published(folder):
            return None, (
                f"{folder} is one checkpoint; name the folder that holds it, {folder.parent}, with "
                f"a file `latest` in it that contains {folder.name}"
            )
        return None, ""
    tag = latest.read_text(errors="replace").strip()
    if not tag or "/" in tag or not (folder / tag).is_dir():
        there = ", ".join(sorted(p.name for p in folder.glob("global_step*"))) or "none"
        return None, (
            f"{latest} names {tag!r}, which is not a checkpoint folder beside it (there: {there}); "
            "write the name of one of those into it, let train.py --allow-fallback take the newest "
            "intact one, or remove it to start from step 0"
        )
    return Saved(folder, tag), ""
