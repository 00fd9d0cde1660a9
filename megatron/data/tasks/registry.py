"""The list of length tasks, and the construction of a task from the config's values."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from megatron.data.errors import TaskError
from megatron.data.tasks.arithmetic import Addition, Modular, Parity
from megatron.data.tasks.base import Task
from megatron.data.tasks.recall import Recall
from megatron.data.tasks.strings import Copy, Reverse, Sort, UniqueCopy
from megatron.suggest import did_you_mean

TASKS: dict[str, type[Task]] = {
    each.name: each for each in (Addition, Copy, Modular, Recall, Parity, Reverse, Sort, UniqueCopy)
}


def build_task(name: str, options: Mapping[str, Any]) -> Task:
    """Build the task `name`.

    Args:
        options: Maps the names of the task's options to values. An option that is not in `options`
            has its default value.

    Raises:
        TaskError: There is no such task or option, or the value of an option is not allowed.
    """
    if name not in TASKS:
        hint = did_you_mean(name, TASKS)
        raise TaskError(f"data_path: no task is called {name!r}; {hint}known: {', '.join(TASKS)}")
    kind = TASKS[name]
    known = {each.name: each for each in fields(kind)}
    for key, value in options.items():
        if key not in known:
            hint = did_you_mean(str(key), known)
            text = f"{name} has no option {key!r}; {hint}known: {', '.join(known)}"
            raise TaskError(f"task_options: {text}")
        default, least = known[key].default, known[key].metadata["least"]
        if isinstance(default, bool):
            fits, wanted = isinstance(value, bool), "true or false"
        else:
            fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
            wanted = f"a whole number of at least {least}"
        if not fits:
            raise TaskError(f"task_options.{key}: {value!r} is not {wanted}")
    task = kind(**options)
    if task.min_length > task.max_length:
        text = f"min_length {task.min_length} is above max_length {task.max_length}"
        raise TaskError(f"task_options: {text}; raise max_length")
    task.require(task.max_length, f"lower max_length, or raise {task.limit}")
    return task
