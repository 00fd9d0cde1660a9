"""Find and read the checkpoints of a run folder. Each checkpoint is an object of class `Saved`.

    RUN/global_stepN/
        mp_rank_*.pt, layer_*.pt, *_optim_states.pt       DeepSpeed's files
        rng_rank_*.pt                                     random streams of dropout, one per rank
        kerple.json                                       the `Record`

A folder may also contain published (GPT-NeoX) checkpoints, or checkpoints that were imported from
GPT-NeoX (see `Kind`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from megatron.config.per_layer import same_layers
from megatron.engine.checkpoint import checksums
from megatron.engine.checkpoint.full_weights import Weights, read_full
from megatron.engine.checkpoint.record import Record, RunDescription
from megatron.engine.errors import CheckpointError
from megatron.engine.neox import read as neox
from megatron.engine.neox.counters import counters
from megatron.engine.safe_load import safe_load
from megatron.model import BlockShape
from megatron.parallel.groups import Groups
from megatron.run_folder import RunFolder, is_published

Kind = Literal["ours", "imported", "published"]
"""The origin and layout of a checkpoint. "imported" means the weights of a published checkpoint, or
of a model of transformers, in this project's layout. "published" means the published layout."""
ADVICE = {
    "model": (
        "Use the config it was trained with, or another `load` and `save`. New positions for a "
        "trained model need `finetune: true` and another `save`"
    ),
    "data": (
        "Restore those settings and the tokens it was trained on (`content` is their fingerprint) "
        "to continue its order of samples exactly, or set `finetune: true` and another `save` to "
        "start a new run from its weights"
    ),
}
"""Maps a field of `RunDescription` to advice for a user whose checkpoint differs in this field."""
# Maps entries that checkpoints of earlier versions lack to the only values that these versions
# had. If `content`, or `tokenizer` of an import, is missing, it is not compared.
_ADDED: dict[str, Any] = {field.name: field.default for field in fields(BlockShape)}
_ADDED |= {"theta_per_layer": False, "rope_scaling": {}, "output_bias": False}
_NAMES = {"max_positions": "max_position_embeddings (rows of pos_emb learned)"}


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk. Its files are read only when a property or method needs them.

    Attributes:
        folder: The run folder.
        tag: The name of the checkpoint's folder in the run folder, `global_stepN`.
    """

    folder: Path
    tag: str

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.folder / self.tag

    @cached_property
    def record(self) -> Record:
        """The content of `kerple.json`. Published (GPT-NeoX) checkpoints have no such file.

        Raises:
            CheckpointError: The file `kerple.json` is missing or damaged.
        """
        return Record.read(self.path)

    @cached_property
    def kind(self) -> Kind:
        """The origin and layout of the checkpoint."""
        if is_published(self.path):
            return "published"
        imported = self.record.imported is not None or self.record.origin
        return "imported" if imported else "ours"

    @property
    def lineage(self) -> str:
        """The id of the run that wrote the checkpoint, or "" if the id is not recorded."""
        return "" if self.kind == "published" else self.record.lineage

    @cached_property
    def counters(self) -> tuple[int, dict[str, Any] | None]:
        """The number of optimizer steps taken, and the learning-rate schedule if it is recorded."""
        # Only published (GPT-NeoX) checkpoints and imports of them record a schedule. The schedule
        # is also None if its record is incomplete.
        if self.kind == "published":
            return counters(self.path)
        return self.record.progress.step, (self.record.imported or {}).get("schedule")

    @property
    def step(self) -> int:
        """The number of optimizer steps taken before the checkpoint was written."""
        return self.counters[0]

    def weights(self) -> Weights:
        """Read all weights as a dict from name to unsharded weight.

        Weights have the dtype in which they are stored. For ZeRO-3, this is fp32. A checkpoint in
        the published (GPT-NeoX) layout cannot be read.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        return read_full(self.path, self.record)

    def imported_tensors(self) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        """Return the buffers and the original shards that an import from GPT-NeoX stored."""
        # See `Published.buffers` and `Published.shards`. For other checkpoints, both are empty.
        if self.kind != "imported" or self.record.imported is None:
            return {}, {}
        state = safe_load(self.path / "mp_rank_00_model_states.pt")
        return state["neox_buffers"], state.get("neox_parts", {})

    def damage(self, groups: Groups, *, optimizer: bool = True) -> str | None:
        """Return a text that names a damaged file and its damage, or None if all files are intact.

        Every rank must call this method. A published (GPT-NeoX) checkpoint has no checksums, so its
        result is None if there are weights.

        Args:
            optimizer: Whether to check the optimizer's files, too.
        """
        # With ZeRO-3, the optimizer's files hold the weights, so they are always checked.
        if is_published(self.path):
            return None if neox.has_weights(self.path) else f"{self.path}: {neox.NO_WEIGHTS}"
        skip = not optimizer and self.record.layout["zero_stage"] < 3
        return checksums.damage(self.path, groups, "*optim_states.pt" if skip else "")

    def require_intact(self, groups: Groups, *, optimizer: bool = True) -> None:
        """Check that the checkpoint's files are intact.

        Args:
            optimizer: Whether to check the optimizer's files, too.

        Raises:
            CheckpointError: A file is damaged.
        """
        if problem := self.damage(groups, optimizer=optimizer):
            raise CheckpointError(f"{self.path} is damaged: {problem}")

    def require_same(self, run: RunDescription, *subjects: str, free: Sequence[str] = ()) -> None:
        """Check that the checkpoint's run and `run` have the same properties.

        Args:
            subjects: The fields of `RunDescription` to compare: "model", "data" or both.
            free: The names of the entries in these fields that may differ, e.g. "rope_scaling".

        Raises:
            CheckpointError: An entry differs. The error message names every entry that differs.
        """
        for subject in subjects:
            there = _ADDED | getattr(self.record, subject)
            here = json.loads(json.dumps(getattr(run, subject)))  # as it would be read back
            if same_layers(here.get("pos_emb"), there.get("pos_emb"), here.get("num_layers", 1)):
                there["pos_emb"] = here.get("pos_emb")
            differing = [
                f"{_NAMES.get(key, key)}: {there.get(key)!r} in the checkpoint, {value!r} here"
                for key, value in here.items()
                if there.get(key) != value
                and (key in there or key not in ("content", "tokenizer"))
                and key not in free
            ]
            if differing:
                raise CheckpointError(
                    f"{self.path} was written with another {subject} ({'; '.join(differing)}). "
                    f"{ADVICE[subject]}"
                )


def finished(folder: Path) -> list[Saved]:
    """Return the complete checkpoints in the run folder `folder`, by increasing step."""
    return [Saved(folder, tag) for tag in RunFolder(folder).tags()]


def newest(folder: Path) -> Saved | None:
    """Return the checkpoint that `folder/latest` names; None if `folder` has no checkpoints.

    Raises:
        CheckpointError: `latest` is missing or names a missing checkpoint, or `folder` is itself a
            checkpoint.
    """
    tag, problem = RunFolder(folder).newest_tag()
    if problem:
        raise CheckpointError(problem)
    return Saved(folder, tag) if tag else None


def require_newest(folder: Path) -> Saved:
    """Return the checkpoint that `folder/latest` names.

    Raises:
        CheckpointError: `folder` has no checkpoints or is itself a checkpoint, or `latest` names no
            checkpoint.
    """
    saved = newest(folder)
    if saved is None:
        raise CheckpointError(
            f"{folder} holds no checkpoint (no file `latest`); name the `save` folder of a run"
        )
    return saved
