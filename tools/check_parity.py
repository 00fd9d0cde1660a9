"""Recompute published numbers with this project's model, engine, schedule and data, and compare.

    python tools/check_parity.py DIR [DIR ...] [--backend NAME ...] [--device cuda] [--tp N]
                                 [--configs DIR]

A DIR holds cases, at any depth: `models/NAME` (config.yml, manifest.json, expected.npz and a
checkpoint), `training/NAME` (the same with curve.npz), `kernels` (probes.npz), `config`
(lr_schedule.json, derived_args.json), `data` (shards, samples_*, iterators, tokenizer_cases.json).
A case is recognised by its files, and its configuration is read from it alone.

The tool prints one line for each case: the greatest error of each quantity, its tolerance, and ok
or FAIL; what could not be checked follows. A line that begins with `-` says why the attention
backend does not serve the case (its dtype, its embedding). The exit code is 1 if a case fails or if
none has a verdict, 2 if the arguments are wrong.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small cases: more threads only wait for each other
from megatron import entry
from tools.parity.result import Result

if TYPE_CHECKING:
    from megatron.parallel.groups import Groups

BACKENDS = ("auto", "fused", "blocked", "flex", "sdpa", "eager")
Run = Callable[[], "Iterable[Result] | Result"]
Case = tuple[str, Run]


def main(argv: list[str] | None = None) -> int:
    """Run every case; see the module docstring for the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    backend_help = "attention backends for models and training (default: eager)"
    parser.add_argument(
        "--backend", nargs="+", default=["eager"], choices=BACKENDS, help=backend_help
    )
    device_help = "where models run (default: cpu)"
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help=device_help)
    tp_help = "shard models and training over that many processes (default: 1)"
    parser.add_argument("--tp", type=int, default=1, help=tp_help)
    configs_help = "the published YAML files that derived_args.json names"
    parser.add_argument("--configs", type=Path, metavar="DIR", help=configs_help)
    args = parser.parse_args(argv)
    folders = [*args.folders, *([args.configs] if args.configs else [])]
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        print(f"no such folder: {', '.join(missing)}", file=sys.stderr)
        return 2
    if args.tp < 1:
        parser.error(f"--tp {args.tp}: at least 1")
    if args.device == "cuda" and not _has_cuda():
        print("--device cuda: torch finds no CUDA GPU; give --device cpu", file=sys.stderr)
        return 2
    if args.tp > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.tp}"]
        command = [str(Path(__file__).resolve()), *(sys.argv[1:] if argv is None else argv)]
        return subprocess.call([sys.executable, *launch, *command])
    if int(os.environ.get("RANK", "0")) > 0:  # join the cases that need all ranks; print nothing
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


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def results_of(name: str, run: Run) -> Iterator[Result]:
    """The results of a case; if it raises, that is its result and the other cases go on."""
    try:
        found = run()
        yield from [found] if isinstance(found, Result) else found
    except Exception as error:  # whatever stops a case, the case has not passed
        where = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(where.filename).name}:{where.lineno}"
        yield Result(name, faults=[f"{type(error).__name__} at {at}: {error}"])


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Each case below the folders, with the function that runs it."""
    for root in args.folders:
        for top, folders, files in os.walk(root.resolve()):
            folders.sort()
            folder = Path(top)
            relative = folder.relative_to(root.resolve().parent)
            yield from cases_in(folder, str(relative), set(files), args)


def cases_in(folder: Path, name: str, files: set[str], args: argparse.Namespace) -> Iterator[Case]:
    """The cases in one folder, recognised by the names of its files."""
    # Imported where a case needs them: data cases need no torch, data and models no DeepSpeed.
    if {"manifest.json", "config.yml"} <= files:
        if not files & {"expected.npz", "curve.npz"}:
            lacks = Result(name, faults=["neither expected.npz nor curve.npz exists"])
            yield name, lambda: lacks
        for number, backend in enumerate(args.backend):
            kind = model_case if "expected.npz" in files else training_case
            options = {"device": args.device, "again": number > 0, "tp": args.tp}
            yield name, partial(kind, folder, name, backend, **options)
    if "probes.npz" in files:
        from tools.parity.kernels import check_kernels

        yield name, lambda: check_kernels(folder / "probes.npz", name)
    if "lr_schedule.json" in files:
        from tools.parity.settings import check_rates

        yield name, lambda: check_rates(folder / "lr_schedule.json", name)
    if "derived_args.json" in files:
        from tools.parity.settings import check_derived

        path = folder / "derived_args.json"
        yield name, lambda: check_derived(path, name, args.configs)
    yield from data_cases(folder, name, files)


def data_cases(folder: Path, name: str, files: set[str]) -> Iterator[Case]:
    """The cases of a data folder, or of one of its sub-folders."""
    from tools.parity import data

    if any(file.endswith(".jsonl") for file in files):
        yield name, lambda: data.check_corpora(folder, name)
    if "tokenizer_cases.json" in files:
        path = folder / "tokenizer_cases.json"
        yield name, lambda: data.check_tokens(path, f"{name} tokenizer")
    if {"index_and_samples.npz", "manifest.json"} <= files:
        yield name, lambda: data.check_samples(folder, name)
    if {"batches.npz", "manifest.json"} <= files:
        yield name, lambda: data.check_iterators(folder, name)


def model_case(
    folder: Path, name: str, backend: str, *, device: str, again: bool, tp: int
) -> Iterator[Result]:
    """A model with one backend; `again` leaves out what does not depend on the backend."""
    from tools.parity.models import check_model

    group = {"tp": groups_of(tp).model} if tp > 1 else {}
    return check_model(folder, name, backend=backend, device=device, again=again, **group)


def training_case(
    folder: Path, name: str, backend: str, *, device: str, again: bool, tp: int
) -> Iterator[Result]:
    """Training steps with one backend, in a job of `tp` processes."""
    from tools.parity.training import check_training

    return check_training(folder, name, groups_of(tp), backend=backend, again=again)


@lru_cache
def groups_of(tp: int) -> Groups:
    """The process groups of this job; all its processes share one tensor-parallel model."""
    from megatron.engine.job.join import join_job

    return join_job().divided(model_size=tp)


def needs_ranks(run: Run) -> bool:
    """Whether every process of a tensor-parallel job must run the case."""
    return getattr(run, "func", None) in (model_case, training_case)


if __name__ == "__main__":
    entry.run(main)
