"""Counters and schedule of a published run, from its checkpoint's `mp_rank_00_model_states.pt`.

The file may be missing or hold anything: a value of an unexpected type counts as not recorded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron.engine.errors import CheckpointError
from megatron.engine.safe_load import safe_load


def client_state(checkpoint: Path) -> dict[str, Any]:
    """The content of the first `mp_rank` file in the folder `global_stepN`; empty without one."""
    path = checkpoint / "mp_rank_00_model_states.pt"
    return load_mapping(path) if path.is_file() else {}


def load_mapping(path: Path) -> dict[str, Any]:
    """Read a file that holds values by name.

    Raises:
        CheckpointError: it holds something different, cannot be opened, or asks to run code.
    """
    loaded = safe_load(path)
    if not isinstance(loaded, dict) or any(not isinstance(name, str) for name in loaded):
        raise CheckpointError(f"{path}: does not hold values by name; fetch the file again")
    return loaded


def counters(checkpoint: Path) -> tuple[int, dict[str, Any] | None]:
    """(optimizer steps done, learning-rate curve if recorded) of the folder `global_stepN`."""
    client = client_state(checkpoint)
    return step_of(client, checkpoint), schedule_of(client)


def schedule_of(client: dict[str, Any]) -> dict[str, Any] | None:
    """The learning-rate curve as `AnnealingLR` loads it."""
    state = mapping(client, "lr_scheduler")
    names = ("start_lr", "end_iter", "warmup_iter", "decay_style", "min_lr", "num_iters")
    if any(name not in state for name in names):
        return None
    return {name: state[name] for name in names}


def step_of(client: dict[str, Any], checkpoint: Path) -> int:
    """Optimizer steps done: as recorded, otherwise from the name of the folder."""
    named = re.fullmatch(r"global_step(\d+)", checkpoint.name)
    recorded = count(client, "iteration") or count(client, "total_iters")
    return recorded or (int(named[1]) if named else 0)


def mapping(client: dict[str, Any], name: str) -> dict[str, Any]:
    """A recorded mapping; empty if there is none."""
    value = client.get(name)
    return value if isinstance(value, dict) else {}


def count(values: dict[str, Any], name: str) -> int | None:
    """A recorded number above 0; None if there is none."""
    value = values.get(name)
    return value if isinstance(value, int) and value > 0 else None
