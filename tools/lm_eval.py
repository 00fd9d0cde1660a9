"""Score a run's newest checkpoint on tasks of lm-evaluation-harness, without an export.

    python tools/lm_eval.py RUN --tasks hellaswag,piqa
    python tools/lm_eval.py RUN --tasks mine --include_path FOLDER_WITH_YAML_FILES

RUN is a run folder. The config is the file `config.yml` in RUN. A published checkpoint has no such
file, so name its config files after RUN. The harness's table is written to standard output. All
other output is written to standard error. If torchrun starts several processes, they share the
model by tensor parallelism.

A task's YAML file may run code (`!function`), and a task's data set may run code, too. Use only
tasks that you trust.
"""

import argparse
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

from megatron import entry, launcher
from megatron.config.command_line import config_parser, load_for_use_or_exit

ASKED = ("tasks", "include_path", "max_length", "batch_size", "seed", "num_fewshot", "limit",
         "gen_kwargs", "log_samples", "confirm_run_unsafe_code")  # fmt: skip
"""The options that `score` takes under the same names."""


def main() -> int:
    """Score the run that the command line names.

    Returns:
        The exit code: 0 on success, 2 for a config error, 1 for another error that the user can
        correct.
    """
    args = parse_arguments()
    if not launcher.is_alone():
        import megatron.engine.job.failure  # noqa: F401  an error of one rank ends the job
    config, out = load_for_use_or_exit(args, args.run), sys.stdout
    from megatron.engine.job.error_messages import user_errors
    from megatron.harness.installed_lm_eval import harness_packages

    # Libraries print to standard output, too.
    with user_errors(), redirect_stdout(sys.stderr), harness_packages():
        from megatron.harness.score_tasks import score

        asked = {name: getattr(args, name) for name in ASKED}
        show = partial(print, file=out)
        score(config, args.run, write=args.output_path, show=show, **asked)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = config_parser(__doc__, "[default: config.yml of the run]")
    parser.usage = "%(prog)s RUN [FILE.yml ...] --tasks A,B,... [options]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    text = "names of tasks, groups or tags, patterns, or paths of YAML files, separated by commas"
    add("--tasks", required=True, metavar="A,B", help=text)
    add("--include_path", type=Path, metavar="DIR", help="folder with the YAML files of more tasks")
    add("--num_fewshot", type=int, metavar="N", help="examples before each question [the task's]")
    add("--limit", type=float, metavar="N", help="questions per task; below 1: the part of them")
    add("--batch_size", type=int, default=8, metavar="N", help="texts in a forward pass [8]")
    text = "the most tokens that the model reads [docs/evaluation.md]"
    add("--max_length", type=int, metavar="N", help=text)
    add("--seed", type=int, default=1234, help="of the examples and of generated texts [1234]")
    text = "generation options that replace the tasks', e.g. temperature=0.8,do_sample=true"
    add("--gen_kwargs", metavar="K=V,...", help=text)
    text = "write each question and answer, too, in FILE.samples.json beside --output_path"
    add("--log_samples", action="store_true", help=text)
    text = "allow tasks that run the code that the model writes"
    add("--confirm_run_unsafe_code", action="store_true", help=text)
    add("--output_path", type=Path, metavar="FILE.json", help="write the results there, too")
    args = parser.parse_intermixed_args()
    if not args.configs:
        parser.error("name the run folder: RUN")
    args.run, *args.configs = Path(args.configs[0]), *args.configs[1:]
    args.tasks = tuple(args.tasks.split(","))
    for name, low in (("batch_size", 1), ("max_length", 1), ("num_fewshot", 0), ("limit", 0)):
        value = getattr(args, name)
        if value is not None and not low <= value < float("inf"):
            parser.error(f"--{name} must be at least {low}, not {value}")
    if args.limit == 0:
        parser.error("--limit must be above 0")
    if args.log_samples and not args.output_path:
        parser.error("--log_samples needs --output_path FILE.json")
    if args.output_path and args.output_path.is_dir():
        parser.error(f"--output_path {args.output_path} is a folder; name a file in it")
    if args.output_path and not args.output_path.absolute().parent.is_dir():
        parser.error(f"--output_path {args.output_path}: there is no such folder")
    return args


if __name__ == "__main__":
    entry.run(main)
