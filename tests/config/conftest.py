"""Define the smallest complete config, and fixtures that load it with changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.config import Config, ConfigError, load_config

BASE = """\
num_layers: 2
hidden_size: 64
num_attention_heads: 4
seq_length: 32
pos_emb: kerple_log
train_iters: 10
train_micro_batch_size_per_gpu: 4
optimizer: {type: Adam, params: {lr: 1e-3}}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yml"
    path.write_text(BASE)
    return path


@pytest.fixture
def load(base: Path, tmp_path: Path) -> Callable[..., Config]:
    """Return load(text, *overrides, world_size=1): it loads the base config merged with `text`."""

    def _load(text: str = "", *overrides: str, world_size: int = 1) -> Config:
        over = tmp_path / "over.yml"
        over.write_text(text)
        return load_config([base, over], overrides, world_size=world_size)

    return _load


@pytest.fixture
def problems(load: Callable[..., Config], tmp_path: Path) -> Callable[..., list[str]]:
    """Return problems(text, *overrides), which returns one line for each problem of the config."""

    def _problems(text: str = "", *overrides: str, world_size: int = 1) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides, world_size=world_size)
        return str(caught.value).replace(f"{tmp_path}/", "").splitlines()[1:]

    return _problems
