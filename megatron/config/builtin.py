"""The values of `data_path` that start with `builtin:`, and the rules for the keys beside them."""

from __future__ import annotations

from typing import Any

from megatron.config.layouts import Found, relation
from megatron.suggest import nearest

_PREFIX = "builtin:"
CORPUS = "builtin:python-stdlib"
"""The `data_path` of the corpus that needs no file."""
TASKS = ("addition", "copy", "modular", "mqar", "parity", "reverse", "sort")
"""The length tasks of `megatron.data.tasks`, whose `data_path` is builtin:NAME."""
TASK_TOKENIZER = "TaskTokenizer"
"""The tokenizer of every length task. It is selected by the task, not by the user."""


def task_name(data_path: Any) -> str | None:
    """Return NAME if `data_path` is builtin:NAME for a length task, otherwise None."""
    name = data_path.removeprefix(_PREFIX) if isinstance(data_path, str) else ""
    return name if name != data_path and name in TASKS else None


@relation("data_path")
def _builtin(given: str | tuple[str, ...]) -> Found | None:
    for path in (given,) if isinstance(given, str) else given:
        if not path.startswith(_PREFIX) or given == CORPUS or task_name(given):
            continue
        if path == CORPUS or task_name(path):
            return "data_path", f"{path} stands alone; write {path}, or prefixes"
        names = (CORPUS.removeprefix(_PREFIX), *TASKS)
        near = nearest(path.removeprefix(_PREFIX), names)
        write = ", ".join(_PREFIX + name for name in ([near] if near else names))
        return "data_path", f"no builtin corpus is called {path!r}; write {write}, or a prefix"
    return None


@relation("data_path", "tokenizer_type", "task_options")
def _task(path: str | tuple[str, ...], tokenizer: str, options: dict) -> Found | None:
    task = task_name(path)
    if task and tokenizer != TASK_TOKENIZER:
        text = f"{tokenizer}, but builtin:{task} has a vocabulary of its own"
        return "tokenizer_type", f"{text}; drop this key"
    if not task and tokenizer == TASK_TOKENIZER:
        return "tokenizer_type", f"{tokenizer} belongs to length tasks such as builtin:copy"
    if options and not task:
        text = "given, but data_path names no length task"
        return "task_options", f"{text}; drop this key, or write e.g. data_path: builtin:copy"
    return None


@relation("data_path", "eval_context_baseline")
def _task_baseline(path: str | tuple[str, ...], context: int) -> Found | None:
    if task_name(path) and context:
        return "eval_context_baseline", "is for text, but data_path is a length task; drop this key"
    return None
