"""Read the step and the learning-rate schedule of a published (GPT-NeoX) checkpoint.

The file `mp_rank_00_model_states.pt` contains the step and the schedule. A missing file is no
error. A value of an unexpected type is treated as missing.
"""

import re
from pathlib import Path
from typing import Any

from megatron.engine.errors import CheckpointError
from megatron.engine.safe_load import safe_load


def client_state(checkpoint: Path) -> dict[str, Any]:
    """Return the client state of a checkpoint: the content of its `mp_rank_00_model_states.pt`.

    The result is {} if the checkpoint has no such file.

    Raises:
        CheckpointError: The file cannot be read, or it contains more than tensors and plain values.
    """
    path = checkpoint / "mp_rank_00_model_states.pt"
    return load_mapping(path) if path.is_file() else {}


def load_mapping(path: Path) -> dict[str, Any]:
    """Read a dictionary with string keys from a file that `torch.save` wrote.

    Raises:
        CheckpointError: The file cannot be read, or is not a dictionary of tensors and plain values
            with string keys.
    """
    loaded = safe_load(path)
    if not isinstance(loaded, dict) or any(not isinstance(name, str) for name in loaded):
        raise CheckpointError(f"{path}: does not hold values by name; fetch the file again")
    return loaded


def counters(checkpoint: Path) -> tuple[int, dict[str, Any] | None]:
    """Return the number of optimizer steps and the learning-rate schedule of a checkpoint.

    The schedule is None if its record is missing or incomplete.

    Args:
        checkpoint: The checkpoint's folder, `global_stepN`.
    """
    client = client_state(checkpoint)
    return step_of(client, checkpoint), schedule_of(client)


def schedule_of(client: dict[str, Any]) -> dict[str, Any] | None:
    """Return the recorded learning-rate schedule, or None if it is missing or incomplete.

    Args:
        client: The content of the checkpoint's file `mp_rank_00_model_states.pt`.
    """
    # The result is an argument for `AnnealingLR.load_state_dict`; `client` comes from
    # `client_state`.
    state = mapping(client, "lr_scheduler")
    names = ("start_lr", "end_iter", "warmup_iter", "decay_style", "min_lr", "num_iters")
    if any(name not in state for name in names):
        return None
    return {name: state[name] for name in names}


def step_of(client: dict[str, Any], checkpoint: Path) -> int:
    """Return the number of optimizer steps that the checkpoint records.

    Args:
        client: The content of the checkpoint's file `mp_rank_00_model_states.pt`.
        checkpoint: The checkpoint's folder, `global_stepN`.
    """
    # Without a record, the number in the name of the folder counts, or 0 if there is none.
    named = re.fullmatch(r"global_step(\d+)", checkpoint.name)
    recorded = count(client, "iteration") or count(client, "total_iters")
    return recorded or (int(named[1]) if named else 0)


def mapping(client: dict[str, Any], name: str) -> dict[str, Any]:
    """Return `client[name]` if it exists and is a dictionary, otherwise {}."""
    value = client.get(name)
    return value if isinstance(value, dict) else {}


def count(values: dict[str, Any], name: str) -> int | None:
    """Return `values[name]` if it exists and is a positive integer, otherwise None."""
    value = values.get(name)
    return value if isinstance(value, int) and value > 0 else None
