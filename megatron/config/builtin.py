"""Define the values of the config key `data_path` that start with `builtin:`."""

from typing import Any

PREFIX = "builtin:"
CORPUS = "builtin:python-stdlib"
"""The `data_path` that selects Python's standard library as corpus. It needs no data file."""
TASKS = ("addition", "copy", "modular", "mqar", "parity", "reverse", "sort", "unique_copy")
"""The names of the length tasks in `megatron.data.tasks`. Their `data_path` is builtin:NAME."""
TASK_TOKENIZER = "TaskTokenizer"
"""The tokenizer of every length task. `load_config` selects it if the user names no tokenizer."""


def task_name(data_path: Any) -> str | None:
    """Return the name of the length task that `data_path` selects, or None if it selects no task.

    For example, `builtin:copy` selects the length task `copy`.
    """
    name = data_path.removeprefix(PREFIX) if isinstance(data_path, str) else ""
    return name if name != data_path and name in TASKS else None
