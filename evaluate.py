"""Measure a checkpoint's perplexity at several lengths, or score it on tasks of lm_eval.

Examples: `python evaluate.py CONFIG.yml --load DIR --lengths 512,1024,2048`, and
`python evaluate.py CONFIG.yml --load DIR --eval_tasks lambada_openai piqa`. With `--suite`, measure
whether the model uses its long context.
"""

import json
import os
import re
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from megatron import entry, launcher
from megatron.config.choices import terms_of
from megatron.config.command_line import (
    config_parser,
    load_for_use_or_exit,
    load_or_exit,
    sharing_layout,
)
from megatron.files import existing, why_unwritable

LENGTHS = "--lengths L1,L2,... (or `eval_lengths` in the config)"
TASKS = "--eval_tasks TASK ... (or `eval_tasks` in the config)"


def main() -> int:
    """Evaluate the checkpoint that the command line names, and return the exit code.

    The exit code is 0 on success, 2 for a config error and 1 for any other error that the user can
    fix.
    """
    parser = config_parser(__doc__)
    parser.add_argument("--load", type=Path, help="run folder (default: the config's load or save)")
    parser.add_argument("--lengths", help="comma-separated (default: the config's eval_lengths)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: the run folder)")
    text = "score these tasks (default: the config's eval_tasks)"
    parser.add_argument("--eval_tasks", nargs="+", metavar="TASK", help=text)
    text = "folder with the YAML files of more tasks"
    parser.add_argument("--include_path", type=Path, metavar="DIR", help=text)
    text = "the results of tasks: PREFIX_eval_results_TIME.json"
    parser.add_argument("--eval_results_prefix", metavar="PREFIX", help=text)
    parser.add_argument("--suite", action="store_true", help="measure the use of long context")
    parser.add_argument("--judge", type=Path, help="run folder that chooses --suite's key tokens")
    args = parser.parse_intermixed_args()
    if args.judge and not args.suite:
        parser.error("--judge chooses the key tokens of --suite; write --suite too")
    if args.eval_tasks and args.suite:
        parser.error("--suite measures no tasks; give --eval_tasks in a command of its own")
    if args.lengths is not None and not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", args.lengths):
        parser.error(f"--lengths {args.lengths}: write whole numbers, e.g. 512,1024,2048")
    overrides = asked(args)
    if not launcher.is_alone():
        import megatron.engine.job.failure  # noqa: F401  an error of one rank ends the job
    # Each rank holds the full model, even if the model was trained with another parallel layout.
    config = load_or_exit(args, *sharing_layout(1), *overrides)
    load = args.load or config.checkpoint.load or config.checkpoint.save
    if args.suite and not config.evaluation.eval_lengths:
        config = load_or_exit(args, *sharing_layout(1), *overrides, *suite_lengths(config))
    lengths = config.evaluation.eval_lengths
    tasks = () if args.suite else config.evaluation.eval_tasks
    missing = [] if load else ["--load DIR (or `load` in the config)"]
    if not lengths and not tasks:
        missing.append(f"{LENGTHS} or {TASKS}")
    if missing or not load:
        entry.refuse(f"error: nothing to evaluate; give {' and '.join(missing)}", 2)
    if lengths and tasks and int(launcher.world_size()) > 1:
        text = "of several processes measures one of both: give --lengths or --eval_tasks"
        entry.refuse(f"error: the config has eval_lengths and eval_tasks, and a job {text}", 2)
    out = args.out or Path(load)
    require_writable(out)
    from megatron.engine.job.error_messages import user_errors

    with user_errors():
        if args.suite:
            from megatron.evaluation.suite.all_measures import run_suite

            run_suite(config, Path(load), out=args.out, judge=args.judge)
            return 0
        if lengths:
            from megatron.evaluation.by_length import evaluate_checkpoint

            evaluate_checkpoint(config, Path(load), out=args.out)
        if tasks:
            score_tasks(args, Path(load), out, overrides)
    return 0


def require_writable(out):
    """Refuse a folder that cannot be written, before an evaluation that may take hours."""
    why = why_unwritable(existing(out))
    if why:
        entry.refuse(f"error: results in {out}: {existing(out)} {why}; give --out DIR", 1)


def asked(args):
    """Return the options of the command line as config overrides.

    If `--lengths` or `--eval_tasks` is given, both `eval_lengths` and `eval_tasks` of the config
    are replaced. A key whose option is not given becomes an empty list.
    """
    prefix = args.eval_results_prefix
    overrides = [f"eval_results_prefix={json.dumps(prefix)}"] if prefix else []
    if args.lengths or args.eval_tasks:
        tasks = [name for text in args.eval_tasks or [] for name in text.split(",") if name]
        overrides += [f"eval_lengths=[{args.lengths or ''}]", f"eval_tasks={json.dumps(tasks)}"]
    return overrides


def suite_lengths(config):
    """Return config overrides with the suite's lengths, 1 to 16 times the training length.

    Lengths beyond the last learned position are left out.
    """
    model = config.model
    lengths = [model.seq_length * 2**power for power in range(5)]
    if "learned" in terms_of(model.pos_emb):
        last = model.max_position_embeddings - model.opt_pos_emb_offset
        lengths = [length for length in lengths if length <= last]
    print(f"no lengths are given: measuring {', '.join(map(str, lengths))}", flush=True)
    return f"eval_lengths={lengths}", f"eval_tokens={max(config.evaluation.eval_tokens, *lengths)}"


@contextmanager
def new_file(path):
    """Create an empty file `path`, or NAME-2, NAME-3, ... if it exists, and yield the file's path.

    Only rank 0 creates a file, which is empty until the tasks are scored, also after a kill. If it
    is still empty after the `with` block, it is removed.
    """
    # Two evaluations may begin in the same second, and must not write the same file.
    task = launcher.task()
    if task.rank if task else int(os.environ.get("RANK") or 0):
        yield path
        return
    for made in (path, *(path.with_stem(f"{path.stem}-{number}") for number in range(2, 1000))):
        with suppress(FileExistsError):
            made.open("x").close()
            break
    try:
        yield made
    finally:
        if made.exists() and not made.stat().st_size:
            made.unlink()


def score_tasks(args, load, out, overrides):
    """Score the config's tasks, and write the results to a JSON file.

    The file is in the folder `out`, unless `eval_results_prefix` gives the start of its path.
    """
    config = load_for_use_or_exit(args, load, *overrides)
    name = f"eval_results_{datetime.now():%m-%d-%Y-%H-%M-%S}.json"
    prefix = config.evaluation.eval_results_prefix
    path = Path(f"{prefix}_{name}") if prefix else out / name
    path.parent.mkdir(parents=True, exist_ok=True)  # now, because tasks may take hours
    from megatron.harness.installed_lm_eval import harness_packages

    with harness_packages(), new_file(path) as made:
        from megatron.harness.score_tasks import score

        score(
            config, load, config.evaluation.eval_tasks,
            include_path=args.include_path, write=made, log_samples=False,
        )  # fmt: skip


if __name__ == "__main__":
    entry.run(main)
