"""Make the arena again: train and measure its runs, and write its tables and pictures.

    python docs/lab/rebuild_arena.py --jobs 2
    python docs/lab/rebuild_arena.py --only code --list

The parts are `rates` (the search of the learning rates), `code` (72 runs), `prose` and `latex` (ten
runs each), `tasks` (96 runs on length tasks) and `page` (tables and pictures of the page). The
corpora of prose and LaTeX must be prepared first (measurements.md says how). Each command of a part
continues what an earlier call of it has begun, so give the same command again after a stop. The
rates that were found are in arena.yml.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from arena_texts import SEED, chosen

ROOT = Path(__file__).parents[2]
RESULTS = "docs/results"
GRID = "configs/paper/arena.yml"
PREPARED = "data/{}_text_document"
PARTS = ("rates", "code", "prose", "latex", "tasks", "page")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to make")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    given = parser.parse_args(arguments)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    for part in (part for part in PARTS if part in given.only):
        prepared = ROOT / f"{PREPARED.format(part)}.idx"
        if part in ("prose", "latex") and not given.list and not prepared.exists():
            print(f"{prepared} is missing: docs/lab/measurements.md has the commands that make it")
            return 1
        for command in commands(part, given.jobs):
            print("$", command, flush=True)
            if given.list:
                continue
            done = subprocess.run(
                shlex.split(command), cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
            )
            if done.returncode:
                return done.returncode
    return 0


def commands(part: str, jobs: int) -> Iterator[str]:
    """Yield the commands of a part. The methods for other text are chosen by the runs on code."""
    prepare = "python prepare_data.py builtin:python-stdlib -d data -t HFTokenizer"
    if part in ("rates", "code"):
        yield f"{prepare} -v configs/quickstart_bpe.json"
    if part in ("rates", "tasks"):
        grid, metric = f"configs/paper/arena_{part}.yml", "--metric exact " * (part == "tasks")
        yield f"python tools/sweep.py {grid} --jobs {jobs}"
        yield f"python tools/table.py {grid} {metric}--out {RESULTS}/arena_{part}"
    if part == "tasks":
        yield f"python docs/lab/arena_tasks.py {RESULTS}/arena_tasks"
    if part == "code":
        yield f"python tools/sweep.py {GRID} --jobs {jobs}"
        yield f"python docs/lab/arena.py {GRID} --out {RESULTS}/arena --jobs {jobs} --tests"
    if part in ("prose", "latex"):
        given = " ".join(f"--set {name}={value}" for name, value in variables_of(part).items())
        for method in chosen(pd.read_csv(ROOT / RESULTS / "arena" / "runs.csv")):
            yield f"python tools/sweep.py {GRID} {given} --jobs {jobs} --only {method}-{SEED}"
        yield f"python docs/lab/arena.py {GRID} {given} --out {RESULTS}/arena_{part} --jobs {jobs}"
    if part == "page":
        folders = " ".join(f"{RESULTS}/{name}" for name in ("arena", "arena_prose", "arena_latex"))
        for name in ("arena_claims", "arena_texts", "arena_page"):
            yield f"python docs/lab/{name}.py {folders}"
        yield "python docs/lab/lab_tables.py"


def variables_of(text: str) -> dict[str, str]:
    """Return the grid's variables for a text."""
    if text == "code":
        return {}
    return {
        "runs": f"runs/arena_{text}",
        "data": PREPARED.format(text),
        "vocab": f"data/stand_in/{text}.json",
        "split": "80,5,15",
    }


if __name__ == "__main__":
    sys.exit(main())
