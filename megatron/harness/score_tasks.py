"""Score a run's newest checkpoint on tasks of lm-evaluation-harness."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from megatron.config import Config
from megatron.data.errors import DataError
from megatron.engine.job.job_or_alone import job_or_alone
from megatron.engine.open_run import open_run
from megatron.files import write_text
from megatron.harness.model import RunModel, longest_context


@dataclass(frozen=True)
class ScoringOptions:
    """The tasks to score, and the settings for scoring them.

    Attributes:
        tasks: Names of tasks, groups or tags, patterns such as `lambada*`, or paths of YAML files.
        include_path: A folder with the YAML files of more tasks, or None.
        num_fewshot: The number of examples before each question. None means the task's own number.
        limit: The number of questions to score per task, or below 1 the fraction of them. None
            scores all questions.
        batch_size: The number of texts in a forward pass.
        max_length: The maximum number of tokens in the model's input. None means the model's own
            maximum.
        seed: The seed of the few-shot examples and of generated texts.
        unsafe_code: Whether tasks may run the code that the model writes.
        gen_kwargs: Generation options `name=value,...` that replace those of the tasks, or None.
        log_samples: Whether to write each question and the model's answer.
    """

    # The model's own maximum is the result of `longest_context`.

    tasks: tuple[str, ...]
    include_path: Path | None = None
    num_fewshot: int | None = None
    limit: float | None = None
    batch_size: int = 8
    max_length: int | None = None
    seed: int = 1234
    unsafe_code: bool = False
    gen_kwargs: str | None = None
    log_samples: bool = False


def score(
    config: Config,
    load: Path,
    options: ScoringOptions,
    write: Path | None,
    show: Callable[[str], None] = print,
) -> None:
    """Score the newest checkpoint in the run folder `load`, and show the harness's tables.

    Every process of the job must call this function. The processes share the model by tensor
    parallelism.

    Args:
        config: The configuration. Its degree of tensor parallelism must be the number of processes.
        load: The run folder.
        options: The tasks and the settings for scoring.
        write: The JSON file for the results, or None.
        show: A function that prints a table. Only rank 0 calls it.

    Raises:
        CheckpointError: `load` holds no checkpoint, or the checkpoint does not fit the config.
        DataError: A task does not exist or cannot be loaded.
    """
    # Must be called inside `harness_packages`. If `log_samples` is true, the questions and answers
    # of each task are written to a second file, whose name ends in `.samples.json`.
    with job_or_alone(config) as groups:
        groups = groups.divided(model_size=groups.world_size)
        manager, tasks = find_tasks(options)
        run = open_run(load, config, groups)
        limit = options.max_length or longest_context(run.model, config)
        run.model.embedding.require_positions(limit)
        shown = None if limit == sys.maxsize else limit
        precision = config.training.precision
        info = {"checkpoint": str(run.saved.path), "precision": precision, "max_length": shown}
        sizes = {"max_length": limit, "batch_size": options.batch_size, "seed": options.seed}
        adapter = RunModel(run.model, run.tokenizer, groups.model, info=info, **sizes)
        if groups.is_main:
            print(run.said())
        results: Any = simple_evaluate(
            model=adapter,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            batch_size=options.batch_size,
            fewshot_random_seed=options.seed,
            confirm_run_unsafe_code=options.unsafe_code,
            gen_kwargs=options.gen_kwargs,
            log_samples=options.log_samples,
        )
        if groups.is_main:
            for column in [each for each in ("results", "groups") if each in results]:
                show(make_table(results, column))
            samples = results.pop("samples", None)
            files = {write: results, write.with_suffix(".samples.json"): samples} if write else {}
            for path, content in files.items():
                if content is not None:
                    text = json.dumps(content, indent=2, default=handle_non_serializable)
                    write_text(path, text + "\n")
                    print(f"written to {path}")


class _Tasks(TaskManager):
    """A task manager that reports all faults of a task's files and data as DataError."""

    def load(self, task_list: Any) -> Any:
        try:
            return super().load(task_list)
        except Exception as error:  # each task's code and data raise errors of their own
            raise DataError(f"a task cannot be loaded: {type(error).__name__}: {error}") from error


def find_tasks(options: ScoringOptions) -> tuple[TaskManager, list[Any]]:
    """Return a task manager, and the names or paths of the tasks in `options`.

    Raises:
        DataError: No task is named, a named task does not exist, or `include_path` is no folder.
    """
    folder, names = options.include_path, [each.strip() for each in options.tasks if each.strip()]
    if not names:
        raise DataError("no task is named; give e.g. lambada_openai")
    if folder and not folder.is_dir():
        raise DataError(f"--include_path {folder}: there is no such folder")
    for with_defaults in (False, True):  # listing the harness's own tasks takes long
        manager = _Tasks(include_path=folder, include_defaults=with_defaults)
        found, missing = dict[str, None](), []
        for name in names:
            matches = [name] if name.endswith((".yaml", ".yml")) else manager.match_tasks([name])
            found.update(dict.fromkeys(sorted(matches)))
            missing += [] if matches else [name]
        if not missing:
            return manager, list(found)
    raise DataError(
        f"there is no task {', '.join(missing)}, neither in lm-evaluation-harness nor in "
        f"{folder or '--include_path DIR'}; `lm_eval ls tasks` lists those of the harness"
    )
