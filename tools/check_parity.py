"""Compare numbers that the published KERPLE code computed with those that this project computes.

    python tools/check_parity.py DIR [DIR ...] [--backend NAME ...] [--device cuda] [--tp N]
                                 [--configs DIR]

Each DIR contains cases, at any depth. A case is a folder with one of these sets of files:

- `models/NAME` has config.yml, manifest.json, expected.npz and a checkpoint.
- `training/NAME` has the same files, but curve.npz instead of expected.npz.
- `kernels` has probes.npz.
- `config` has lr_schedule.json and derived_args.json.
- `data` has shards, tokenizer_cases.json, and the folders samples_* and iterators.

config.yml is the only configuration file of a case in `models` or `training`. A case `config` names
YAML files of the published code, and `--configs` can name the folder that contains these YAML
files.

For each case, the tool prints one line: ok or FAIL, the greatest error of each quantity with its
tolerance, and what could not be checked. If the attention backend does not support a case, the line
begins with `-` and gives the reason, for example the dtype. The exit code is 1 if a case fails or
if no case could be checked, and 2 if the arguments are wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads would slow the small cases down
from megatron import entry
from tests.parity.result import Result

if TYPE_CHECKING:
    from megatron.parallel.groups import Groups

BACKENDS = ("auto", "fused", "blocked", "flex", "sdpa", "eager")
CHECKS = {
    ("probes.npz",): "kernel_cases:check_kernels",
    ("lr_schedule.json",): "settings_cases:check_rates",
    ("derived_args.json",): "settings_cases:check_derived",
    ("*.jsonl",): "data_cases:check_corpora",
    ("tokenizer_cases.json",): "data_cases:check_tokens",
    ("index_and_samples.npz", "manifest.json"): "data_cases:check_samples",
    ("batches.npz", "manifest.json"): "data_cases:check_iterators",
}
"""Maps the files that a case has to the function in `tests.parity` that checks the case."""
Run = Callable[[], "Iterable[Result] | Result"]
Case = tuple[str, Run]


def main(argv: list[str] | None = None) -> int:
    """Run every case, print the results, and return the exit code."""
    # See the module docstring.
    parser = entry.parser(__doc__)
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="DIR")
    backends = "attention backends for models and training (default: eager)"
    add("--backend", nargs="+", default=["eager"], choices=BACKENDS, help=backends)
    add("--device", default="cpu", choices=("cpu", "cuda"), help="where models run (default: cpu)")
    processes = "shard models and training over that many processes (default: 1)"
    add("--tp", type=entry.number(int, 1), default=1, help=processes)
    configs = "the published YAML files that derived_args.json names"
    add("--configs", type=Path, metavar="DIR", help=configs)
    args = parser.parse_args(argv)
    folders = [*args.folders, *([args.configs] if args.configs else [])]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        parser.error(f"no such folder: {', '.join(missing)}")
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            parser.error("--device cuda: torch finds no CUDA GPU; give --device cpu")
    if args.tp > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.tp}"]
        command = [str(Path(__file__).resolve()), *(sys.argv[1:] if argv is None else argv)]
        return subprocess.call([sys.executable, *launch, *command])
    if int(os.environ.get("RANK", "0")) > 0:  # run only cases that need all ranks; print nothing
        for name, run in cases(args):
            if needs_ranks(run):
                for _ in results_of(name, run):
                    pass
        return 0
    total = failed = refused = partly = 0
    for name, run in cases(args):
        for result in results_of(name, run):
            print(result.line(), flush=True)
            if result.refusal and not result.faults:
                refused += 1
                continue
            total += 1
            failed += not result.passed
            partly += bool(result.unchecked)
    if not total:
        what = "backend serves a case" if refused else "case found"
        print(f"no {what} in {', '.join(map(str, args.folders))}", file=sys.stderr)
        return 1
    more = f", {refused} not served by the backend asked for" if refused else ""
    more += f", {partly} checked in part" if partly else ""
    print(f"{total} cases, {failed} failed{more}")
    return 1 if failed else 0


def results_of(name: str, run: Run) -> Iterator[Result]:
    """Run a case, and yield its results.

    Args:
        name: The name of the case for the output.
        run: The function that runs the case.
    """
    # If the case raises an exception, a failed result that describes the exception is yielded.
    try:
        found = run()
        yield from [found] if isinstance(found, Result) else found
    except Exception as error:  # any exception means that this case fails, and not the whole tool
        where = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(where.filename).name}:{where.lineno}"
        yield Result(name, faults=[f"{type(error).__name__} at {at}: {error}"])


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield (name, function that runs the case) for each case in or below the given folders.

    Args:
        args: The parsed command line, which names the folders.
    """
    for root in map(Path.resolve, args.folders):
        for folder in [root, *sorted(path for path in root.rglob("*") if path.is_dir())]:
            files = {path.name for path in folder.iterdir() if not path.is_dir()}
            yield from cases_in(folder, str(folder.relative_to(root.parent)), files, args)


def cases_in(folder: Path, name: str, files: set[str], args: argparse.Namespace) -> Iterator[Case]:
    """Yield (name, function that runs the case) for each case in `folder`.

    Args:
        folder: The folder to examine, without its subfolders.
        name: The name of the folder for the output.
        files: The names of the files in `folder`, by which a case is recognised.
        args: The parsed command line.
    """
    if {"manifest.json", "config.yml"} <= files:
        if not files & {"expected.npz", "curve.npz"}:
            lacks = Result(name, faults=["neither expected.npz nor curve.npz exists"])
            yield name, lambda: lacks
        for number, backend in enumerate(args.backend):
            options = {"backend": backend, "device": args.device, "again": number > 0}
            yield name, partial(sharded_case, folder, name, files, args.tp, **options)
    for wanted, check in CHECKS.items():
        if all(fnmatch.filter(files, each) for each in wanted):
            given = {"configs": args.configs} if check.endswith("check_derived") else {}
            yield name, partial(_check, check, folder, name, **given)


def _check(check: str, *arguments: Any, **options: Any) -> Iterable[Result] | Result:
    # Modules are imported only for the cases that need them: data and model cases run without
    # DeepSpeed.
    return resolve_name(f"tests.parity.{check}")(*arguments, **options)


def sharded_case(
    folder: Path, name: str, files: set[str], tp: int, *, device: str, **options: Any
) -> Iterator[Result]:
    """Check one case about a model or its training, with one attention backend.

    With `tp` above 1, the model is sharded over `tp` processes.

    Args:
        folder: The folder of the case.
        name: The name of the case for the output.
        files: The names of the files in `folder`.
        tp: The number of tensor-parallel ranks.
        device: The device for a case about a model, `cpu` or `cuda`.
        options: More arguments for the check.
    """
    # A case of the kind `models` has expected.npz. `backend` in `options` is the name of the
    # attention backend. `again` says whether another backend was already checked. If so, results
    # that do not depend on the backend are left out.
    if "expected.npz" in files:
        from tests.parity.model_cases import check_model

        group = {"tp": groups_of(tp).model} if tp > 1 else {}
        return check_model(folder, name, device=device, **group, **options)
    from tests.parity.training_cases import check_training

    return check_training(folder, name, groups_of(tp), **options)


@lru_cache
def groups_of(tp: int) -> Groups:
    """Join the distributed job, and return its process groups with `tp` tensor-parallel ranks."""
    from megatron.engine.job.join import join_job

    return join_job().divided(model_size=tp)


def needs_ranks(run: Run) -> bool:
    """Return whether every rank of a tensor-parallel job must run the case, not only rank 0."""
    return getattr(run, "func", None) is sharded_case


if __name__ == "__main__":
    entry.run(main)
