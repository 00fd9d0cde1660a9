"""Read the files of a parity case: arrays, manifest and configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config import Config, load_config


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an `.npz` file as a dict from name to array."""
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of a case's `manifest.json`."""
    return json.loads((folder / "manifest.json").read_text())


def case_config(folder: Path, overrides: list[str], vocab_size: int) -> Config:
    """Load a case's config for one process, with the vocabulary padded to `vocab_size`.

    `seq_length_val` is ignored, because it may exceed the number of learned positions. The lengths
    to compare are read from the case instead.
    """
    fixed = [f"make_vocab_size_divisible_by={vocab_size}", "seq_length_val=null"]
    fixed += ["model_parallel_size=1", "pipe_parallel_size=1"]
    return load_config([folder / "config.yml"], fixed + overrides)


def require_divisible(config: Config, vocab_size: int, ranks: int) -> None:
    """Check that the model of a case can be sharded over `ranks` tensor-parallel ranks.

    Raises:
        ValueError: The number of heads or the vocabulary size is not a multiple of `ranks`. All
            ranks raise this error together.
    """
    heads = config.model.num_attention_heads
    if heads % ranks or vocab_size % ranks:
        raise ValueError(
            f"{heads} heads and a vocabulary of {vocab_size} cannot be sharded over {ranks} ranks"
        )
