"""Load a run's model in one process, without a training job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.config import Config, load_config
from megatron.config.command_line import sharing_layout
from megatron.data.tokenizers.base import Tokenizer
from megatron.engine.build import tokenizer_of
from megatron.engine.checkpoint.load_weights import load_model
from megatron.engine.errors import CheckpointError
from megatron.engine.shape import DTYPES
from megatron.model import GPT
from megatron.parallel.groups import build_groups

PRECISIONS = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
PRECISIONS |= {"float64": "fp32"}
"""Maps a dtype's name to the config's precision in which the weights are read."""


@dataclass(frozen=True)
class Run:
    """A run's model, with the weights of its newest checkpoint, on the CPU.

    Attributes:
        dtype: The dtype of the weights.
        checkpoint: The checkpoint's folder.
        notes: Lines to print for the user.
    """

    config: Config
    tokenizer: Tokenizer
    model: GPT
    dtype: torch.dtype
    checkpoint: Path
    notes: list[str]


def load_run(
    folder: Path, files: Sequence[Path], overrides: Sequence[str], dtype: str | None
) -> Run:
    """Load the newest checkpoint of the run folder `folder`.

    Args:
        files: Config files. If there are none, the run's `config.yml` is read.
        overrides: Config overrides, `key=value`.
        dtype: The dtype of the weights, such as "bfloat16". None: the run's precision.

    Raises:
        CheckpointError, ConfigError: The run cannot be loaded.
    """
    if not files and not (folder / "config.yml").is_file():
        raise CheckpointError(f"{folder} has no config.yml; name the config files with --config")
    given = ["attention_backend=eager", *overrides, *sharing_layout(1)]
    given += [] if dtype is None else [f"precision={PRECISIONS[dtype]}"]
    config = load_config([str(file) for file in files or [folder / "config.yml"]], given)
    tokenizer = tokenizer_of(config)
    model, saved, notes = load_model(config, folder, tokenizer, build_groups(torch.device("cpu")))
    stored = DTYPES[config.training.precision] if dtype is None else getattr(torch, dtype)
    return Run(config, tokenizer, model.to(stored), stored, saved.path, notes)
