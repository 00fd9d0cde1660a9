"""Score a run's newest checkpoint on tasks of lm-evaluation-harness."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table, simple_parse_args_string

from megatron.config import Config
from megatron.data.errors import DataError
from megatron.engine.job.job_or_alone import job_or_alone
from megatron.engine.open_run import open_run
from megatron.files import write_text
from megatron.harness.model import RunModel, generation_of

_YAML = (".yaml", ".yml")


def score(
    config: Config, load: Path, tasks: Sequence[str], *, include_path: Path | None = None,
    max_length: int | None = None, batch_size: int = 8, seed: int = 1234,
    write: Path | None = None, show: Callable[[str], None] = print, **asked: Any,
) -> None:  # fmt: skip
    """Score the newest checkpoint in the run folder `load`, and show the tables of the scores.

    Every process of the job must call this function, because tensor parallelism splits the model
    over all processes.

    Args:
        config: The configuration. Its degree of tensor parallelism must be the number of processes.
        load: The run folder.
        tasks: Names of tasks, groups or tags, patterns such as `lambada*`, or paths of YAML files.
        include_path: A folder with the YAML files of more tasks, or None.
        max_length: The maximum number of tokens in the model's input. None means the model's own
            maximum (`GPT.longest_text`).
        batch_size: The number of texts in a forward pass.
        seed: The seed of the few-shot examples and of generated texts.
        write: The JSON file for the results, or None.
        show: A function that prints a table. Only rank 0 calls it.
        asked: More arguments of the harness's `simple_evaluate`, such as `limit` and `num_fewshot`.

    Raises:
        CheckpointError: `load` contains no checkpoint, or the checkpoint does not fit the config.
        DataError: A task does not exist or cannot be loaded, or has an option that cannot be used.
    """
    # Must be called inside `harness_packages`. If `log_samples` is true, the questions and answers
    # of each task are written to a second file, whose name ends in `.samples.json`.
    with job_or_alone(config) as groups:
        groups = groups.divided(model_size=groups.world_size)
        manager, found = find_tasks(tasks, include_path)
        run = open_run(load, config, groups)
        limit = max_length or run.model.longest_text  # None: no limit
        run.model.embedding.require_positions(limit or 0)
        manager.max_length = limit or sys.maxsize
        manager.replaced = simple_parse_args_string(asked.get("gen_kwargs"))
        info = {"checkpoint": str(run.saved.path), "max_length": limit}
        info |= {"precision": config.training.precision}
        sizes = {"max_length": manager.max_length, "batch_size": batch_size, "seed": seed}
        adapter = RunModel(run.model, run.tokenizer, groups.model, info=info, **sizes)
        print(run.said()) if groups.is_main else None
        results: Any = simple_evaluate(
            model=adapter, tasks=found, task_manager=manager, batch_size=batch_size,
            fewshot_random_seed=seed, **asked,
        )  # fmt: skip
        if groups.is_main:
            for column in [each for each in ("results", "groups") if each in results]:
                show(make_table(results, column))
            samples = results.pop("samples", None)
            more = write and write.with_name(f"{write.name.removesuffix('.json')}.samples.json")
            for path, content in ((write, results), (more, samples)):
                if path and content is not None:
                    text = json.dumps(content, indent=2, default=handle_non_serializable)
                    write_text(path, text + "\n")
                    print(f"written to {path}")


class _Tasks(TaskManager):
    """A task manager that raises DataError for any fault in the files or data of a task.

    Attributes:
        max_length: The maximum number of tokens in the input of the model.
        replaced: Generation options that replace those of the tasks.
    """

    max_length: int
    replaced: dict[str, Any]

    def load(self, task_list: Any) -> Any:
        try:
            loaded = super().load(task_list)
        except Exception as error:  # each task's code and data raise errors of their own
            raise DataError(f"a task cannot be loaded: {type(error).__name__}: {error}") from error
        for task in loaded["tasks"].values():  # before any other task is scored, for hours
            # A class may have this type by default, and make no such requests.
            if type(task) is ConfigurableTask and task.OUTPUT_TYPE == "generate_until":
                given = task.get_config("generation_kwargs") or {}
                generation_of(given | self.replaced, self.max_length)
        return loaded


def find_tasks(tasks: Sequence[str], folder: Path | None) -> tuple[_Tasks, list[Any]]:
    """Return a task manager, and the names or paths of the tasks that match `tasks`.

    Args:
        tasks: Names of tasks, groups or tags, patterns such as `lambada*`, or paths of YAML files.
        folder: The folder with the YAML files of more tasks, or None.

    Raises:
        DataError: `tasks` is empty, a task does not exist, or `folder` is not a folder.
    """
    names = [each.strip() for each in tasks if each.strip()]
    if not names:
        raise DataError("no task is named; give e.g. lambada_openai")
    if folder and not folder.is_dir():
        raise DataError(f"--include_path {folder}: there is no such folder")
    for with_defaults in (False, True):  # listing the harness's own tasks takes long
        manager = _Tasks(include_path=folder, include_defaults=with_defaults)
        found, missing = dict[str, None](), []
        whole = {*manager.all_subtasks, *(each for each in names if each.endswith(_YAML))}
        for name in names:
            matches = [name] if name.endswith(_YAML) else manager.match_tasks([name])
            found.update(dict.fromkeys(sorted(matches)))
            missing += [] if matches else [name]
        # A pattern, and a group or tag of the folder, may also mean tasks of the harness.
        if not missing and (with_defaults or whole.issuperset(names)):
            return manager, list(found)
    raise DataError(
        f"there is no task {', '.join(missing)}, neither in lm-evaluation-harness nor in "
        f"{folder or '--include_path DIR'}; `lm_eval ls tasks` lists those of the harness"
    )
