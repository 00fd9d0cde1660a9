"""Make the arena again: train and measure its runs, and write its tables and pictures.

    python docs/lab/rebuild_arena.py --jobs 2
    python docs/lab/rebuild_arena.py --only code --list

The parts are `rates` (the search of the learning rates), `code` (72 runs), `prose` and `latex` (ten
runs each), `tasks` (96 runs on length tasks) and `page` (tables and pictures of the page). The
corpora of prose and LaTeX must be prepared first (measurements.md says how). Each command of a part
continues what an earlier call of it has begun, so give the same command again after a stop. Runs
that fail are named, and the others are measured; the exit code is then 1. The script overwrites
the results in docs/results, and `git diff` shows the changes.

The rates that were found are in arena.yml. The methods for prose and LaTeX are chosen by the runs
on code. No part writes the tables of rates and scores in plan_arena.md, or again.csv.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
from arena_texts import SEED, chosen

ROOT = Path(__file__).parents[2]
RESULTS = "docs/results"
GRID = "configs/paper/arena.yml"
PREPARED, VOCABULARY = "data/{}_text_document", "data/stand_in/{}.json"
PARTS = ("rates", "code", "prose", "latex", "tasks", "page")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to make")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--stale", choices=("rerun", "keep"), help="as in tools/sweep.py")
    given = parser.parse_args(arguments)
    parts = [part for part in PARTS if part in given.only]
    missing = missing_texts(parts)
    if missing and not given.list:
        print(f"{missing[0]} is missing: docs/lab/measurements.md says how to make it")
        return 1
    failed = 0
    for part in parts:
        for command in commands(part, given.jobs):
            sweep = "tools/sweep.py" in command
            words = command + (f" --stale {given.stale}" if sweep and given.stale else "")
            print("$", words, flush=True)
            code = 0 if given.list else run(words)
            if code and not (sweep and code == 1):
                return code
            failed = failed or code
    return failed


def run(command: str) -> int:
    """Run a command of this checkout with this Python, and return its exit code.

    After SIGINT or SIGTERM, the command ends as it does alone: a sweep stops its runs.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    words = [sys.executable, *shlex.split(command)[1:]]
    process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
    except KeyboardInterrupt:  # the command has the signal, too
        code = process.wait() or 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 128 - code if code < 0 else code


def missing_texts(parts: Sequence[str]) -> list[Path]:
    """Return the files of prose and LaTeX that some parts need and that are not prepared."""
    texts = [part for part in parts if part in ("prose", "latex")]
    files = [ROOT / each.format(text) for text in texts for each in (f"{PREPARED}.idx", VOCABULARY)]
    return [file for file in files if not file.exists()]


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
        methods = chosen(pd.read_csv(ROOT / RESULTS / "arena" / "runs.csv"))
        only = " ".join(f"--only {method}-{SEED}" for method in methods)
        yield f"python tools/sweep.py {GRID} {given} --jobs {jobs} {only}"
        yield f"python docs/lab/arena.py {GRID} {given} --out {RESULTS}/arena_{part} --jobs {jobs}"
    if part == "page":
        folders = " ".join(f"{RESULTS}/{name}" for name in ("arena", "arena_prose", "arena_latex"))
        for name in ("arena_claims", "arena_texts", "arena_page"):
            yield f"python docs/lab/{name}.py {folders}"
        if not missing_texts(("prose", "latex")):
            yield "python docs/lab/arena_text_sizes.py"
        yield "python docs/lab/lab_tables.py"


def variables_of(text: str) -> dict[str, str]:
    """Return the grid's variables for a text."""
    if text == "code":
        return {}
    return {
        "runs": f"runs/arena_{text}",
        "data": PREPARED.format(text),
        "vocab": VOCABULARY.format(text),
        "split": "80,5,15",
    }


if __name__ == "__main__":
    sys.exit(main())
