"""Define and read the content of a checkpoint's `kerple.json`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron.engine.checkpoint.checksums import RECORD
from megatron.engine.errors import CheckpointError
from megatron.files import parse_json

LAYOUT_DEFAULTS: dict[str, Any] = {
    "model_parallel_size": 1,
    "pipe_parallel_size": 1,
    "context_parallel_size": 1,
    "sub_group_size": None,
}
"""Layout entry -> its value in checkpoints of earlier versions, which did not record the entry."""


@dataclass(frozen=True)
class TrainingProgress:
    """The counters of a run. A resumed run uses them to continue the order of the samples.

    Attributes:
        step: the number of optimizer steps taken.
        consumed_samples: the number of training samples read.
        train_samples: the number of samples for which the training index was first built. The order
            of the samples depends on this number, so a resumed run keeps it.
        interval: the state of the training loop since the last log line, as JSON values: the sums
            of the losses (`Meter.state`), and `owes_validation` if the run left before the
            evaluation of this step was complete.
    """

    step: int
    consumed_samples: int
    train_samples: int
    interval: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunDescription:
    """The description of a run that its checkpoints record, as JSON values.

    Attributes:
        model: the result of `build.identity_of`; models with equal values can share weights.
        data: the values that determine the order of the samples.
        layout: the degrees of parallelism, ZeRO stage, precision and optimizer.
        shapes: parameter name -> unsharded shape.
        cuts: name of a sharded parameter -> [dimension, blocks]. The class `Sharding` in
            `megatron.parallel` defines both numbers.
        layers: the names of a pipeline's layers, in the order of their checkpoint files; None
            without a pipeline.
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
    """The content of a checkpoint's `kerple.json`.

    Fields that earlier versions or imports do not write have defaults.

    Attributes:
        version: the version of this project that wrote the checkpoint.
        progress: the counters of the run when the checkpoint was written.
        imported: the values from which an export restores the original files (`Published.about`),
            if the checkpoint was imported from GPT-NeoX's format. Otherwise None.
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
            CheckpointError: the file `kerple.json` is missing or damaged.
        """
        path = checkpoint / RECORD
        try:
            stored = parse_json(path.read_text())
            known = {f.name: stored[f.name] for f in fields(cls) if f.name in stored}
            known["progress"] = TrainingProgress(**stored["progress"])
            known["layout"] = LAYOUT_DEFAULTS | stored["layout"]
            return cls(**known)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}); this folder was not written by this code, or "
                f"it is damaged: name another checkpoint in {checkpoint.parent / 'latest'}"
            ) from error
