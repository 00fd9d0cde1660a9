"""The content of a checkpoint's `kerple.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron.engine.checkpoint.checksums import RECORD
from megatron.engine.errors import CheckpointError

LAYOUT_DEFAULTS: dict[str, Any] = {
    "model_parallel_size": 1,
    "pipe_parallel_size": 1,
    "context_parallel_size": 1,
    "sub_group_size": None,
}
"""Values of a layout that earlier versions did not record."""


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run has come: all that the data order and the counters need.

    Attributes:
        step: optimizer steps done.
        consumed_samples: training samples read.
        train_samples: sample count that the training index was first built for; the published
            order depends on it, so a run never changes it.
    """

    step: int
    consumed_samples: int
    train_samples: int


@dataclass(frozen=True)
class RunDescription:
    """What a checkpoint records about the run that wrote it, as JSON values.

    Attributes:
        model: what makes weights interchangeable (`build.identity_of`).
        data: what the order of the samples depends on.
        layout: parallel sizes, ZeRO stage, precision and optimizer.
        shapes: parameter name -> unsharded shape.
        cuts: name of a sharded parameter -> [dimension, blocks], see `megatron.parallel.Sharding`.
        layers: names of a pipeline's layers, in the order of its files; None without a pipeline.
        config: the resolved configuration, as flat keys.
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    layers: list[str] | None = None
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Record(RunDescription):
    """A `kerple.json`. Fields that earlier versions or imports leave out have defaults.

    Attributes:
        version: of the code that wrote it.
        progress: how far the run had come.
        imported: what an export needs to restore the published files (`Published.about`); None
            unless the checkpoint was imported.
        files: file name -> [bytes, CRC-32].
    """

    version: str = ""
    progress: TrainingProgress
    imported: dict[str, Any] | None = None
    files: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint: Path) -> Record:
        """Read the record of the checkpoint folder `checkpoint`.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        path = checkpoint / RECORD
        try:
            stored = json.loads(path.read_text())
            known = {f.name: stored[f.name] for f in fields(cls) if f.name in stored}
            known["progress"] = TrainingProgress(**stored["progress"])
            known["layout"] = LAYOUT_DEFAULTS | stored["layout"]
            return cls(**known)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}); this folder was not written by this code, or "
                f"it is damaged: name another checkpoint in {checkpoint.parent / 'latest'}"
            ) from error
