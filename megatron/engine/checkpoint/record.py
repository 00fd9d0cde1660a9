"""Define and read the content of a checkpoint's `kerple.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from megatron.engine.checkpoint.checksums import FORMAT, MOST_BYTES
from megatron.engine.errors import CheckpointError
from megatron.engine.neox.shape import Shape
from megatron.files import read_small
from megatron.run_folder import RECORD, RunFolder
from megatron.version import __version__

SIZES = ("model_parallel_size", "zero_stage")
"""The entries of `RunDescription.layout` that are needed to read a checkpoint's weights."""
LAYOUT_DEFAULTS: dict[str, Any] = {
    "model_parallel_size": 1,
    "pipe_parallel_size": 1,
    "context_parallel_size": 1,
    "sub_group_size": None,
    "theta_lr_multiplier": 1.0,
    "theta_frozen": False,
}
"""Values of layout entries that earlier versions of this project did not record in checkpoints."""


def _completed(layout: dict[str, Any]) -> dict[str, Any]:
    layout = LAYOUT_DEFAULTS | layout
    for key in SIZES:
        if not isinstance(layout.get(key), int):
            raise ValueError(f"{key} is {layout.get(key)!r}, not a whole number")
    return layout


Layout = Annotated[dict[str, Any], AfterValidator(_completed)]
Pair = Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]


class Interval(TypedDict, total=False):
    """The state of the training loop, as JSON values (see `TrainingProgress`)."""

    steps: NonNegativeInt
    losses: list[float]
    average_loss: float
    owes_validation: bool


class Imported(TypedDict):
    """The facts from which an export restores the files of a checkpoint imported from GPT-NeoX."""

    shape: Shape
    schedule: dict[str, Any] | None
    args: dict[str, Any]


@dataclass(frozen=True)
class TrainingProgress:
    """The counters of a run, from which a resumed run continues the order of the samples.

    Attributes:
        step: The number of optimizer steps taken.
        consumed_samples: The number of training samples used.
        train_samples: The number of training samples that the run planned when it began. It
            determines the order of the samples, so a resumed run keeps it.
        interval: The state of the training loop, as JSON values. It includes the sums of the losses
            since the last log line.
    """

    # `interval` holds `Meter.state` and `LossGuard.state`. It also holds `owes_validation` if a
    # validation was due after `step`, but the run ended before it.

    step: NonNegativeInt
    consumed_samples: NonNegativeInt
    train_samples: NonNegativeInt
    interval: Interval = field(default_factory=Interval)


@dataclass(frozen=True)
class RunDescription:
    """The description of a run, as JSON values. Every checkpoint of the run records it.

    Attributes:
        model: The properties of the model that determine its weights. Two models with equal values
            can exchange weights.
        data: The values that determine the order of the samples.
        layout: The degrees of parallelism, ZeRO stage, precision and optimizer.
        shapes: Maps each parameter's name to its unsharded shape.
        cuts: Maps each sharded parameter's name to [dimension, blocks]. The parameter is a stack of
            `blocks` tensors along this dimension, and each of these tensors is sharded by itself.
        layers: The names of a pipeline's layers, in the order of their checkpoint files; None
            without a pipeline.
        config: The resolved configuration, as flat keys.
        lineage: The id of the run, drawn at random at step 0. A resumed run keeps the id. It is ""
            for a run that an earlier version of this project started.
    """

    # For example, a gated MLP stacks value and gate, so it has 2 blocks (see `Sharding`).

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, list[NonNegativeInt]] = field(default_factory=dict)
    cuts: dict[str, Pair] = field(default_factory=dict)
    layers: list[str] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    lineage: str = ""


@dataclass(frozen=True, kw_only=True)
class Record(RunDescription):
    """The content of a checkpoint's file `kerple.json`.

    Attributes:
        format: The version of the format of `kerple.json`, an integer.
        version: The version of this project that wrote the checkpoint.
        progress: The counters of the run when the checkpoint was written.
        imported: What an export needs to restore the original GPT-NeoX files. None if the
            checkpoint was not imported from GPT-NeoX.
        origin: The name of a transformers class if the weights were imported from a model of that
            class, otherwise "".
        files: Maps each file's name to [size in bytes, CRC-32].
    """

    # Fields that earlier versions or imports do not write have defaults.

    format: NonNegativeInt = FORMAT
    version: str = ""
    progress: TrainingProgress
    layout: Layout  # pyright: ignore[reportGeneralTypeIssues]  required here
    imported: Imported | None = None
    origin: str = ""
    files: dict[str, Pair] = field(default_factory=dict)

    @classmethod
    def read(cls, checkpoint: Path) -> Record:
        """Read the record of the checkpoint folder `checkpoint`.

        Raises:
            CheckpointError: The file `kerple.json` is missing or damaged.
        """
        path = checkpoint / RECORD
        try:
            content = read_small(path, MOST_BYTES)
            written = _VERSIONS.validate_json(content)
            if written.format > FORMAT:
                raise CheckpointError(
                    f"{path} is of format {written.format}, written by version {written.version}; "
                    f"this is version {__version__}, which reads formats up to {FORMAT}: update "
                    "it, or name another checkpoint"
                )
            return _RECORD.validate_json(content, strict=True)
        except (OSError, ValueError) as error:
            why = _problems(error) if isinstance(error, ValidationError) else error
            raise CheckpointError(
                f"{path}: cannot be read ({why}); this folder was not written by this code, or "
                f"it is damaged: name another checkpoint in {RunFolder(checkpoint.parent).latest}"
            ) from error


@dataclass(frozen=True)
class _Versions:
    """The entries that `kerple.json` contains in every version of the format."""

    format: NonNegativeInt = FORMAT
    version: str = ""


_VERSIONS, _RECORD = TypeAdapter(_Versions), TypeAdapter(Record)


def _problems(error: ValidationError) -> str:
    """Return a text that names each invalid entry of a record and its problem."""
    found = (
        f"{'.'.join(map(str, each['loc']))}: {each['msg']}".removeprefix(": ")
        for each in error.errors(include_input=False, include_url=False)
    )
    return "; ".join(found)
