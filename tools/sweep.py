"""Run a grid of training runs, each with its final evaluation.

    python tools/sweep.py configs/paper/table3.yml --list
    python tools/sweep.py configs/paper/table3.yml --set model=xl --gpus 0,1,2,3
    python tools/sweep.py GRID.yml --only 'github-*' --jobs 2

Each cell (run) of the grid has its own run folder, with its log in log.txt. If the same command is
run again, the tool skips finished cells and resumes the others. A cell is stale if its config, text
or code has changed since its run began. Stale cells are reported and left as they are, unless
`--stale rerun` is given. Several sweeps may run the same grid at the same time: each sweep skips
the cells that another sweep is running. The file cells.csv beside the run folders lists all cells.
The exit code is 1 if a cell failed, is stale or was left to another sweep, and 130 after a signal.
"""

import argparse
import os
import shlex
import signal
from fnmatch import fnmatch
from pathlib import Path

from megatron import entry
from megatron.config import ConfigError
from tools.experiments.description import TrainedTokenizer
from tools.experiments.grid import Cell, Grid, filled, read_grid
from tools.experiments.runner import SIGNALS, Runner
from tools.experiments.state import state_of, write_index
from tools.train_tokenizer import train_tokenizer


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = entry.parser(__doc__)
    add = parser.add_argument
    add("grid", type=Path, metavar="GRID.yml")
    add("--set", action="append", default=[], type=entry.assignment, metavar="NAME=VALUE",
        help="a variable of the grid")  # fmt: skip
    only = "only cells with such a name, e.g. '*kerple*-1235'; may be given several times"
    add("--only", action="append", metavar="PATTERN", help=only)
    add("--cell", type=int, metavar="N", help="only the N-th cell, counted from 0")
    add("--list", "--check", action="store_true", help="check and show all cells, run nothing")
    jobs = "cells at a time [1, or one for each GPU]"
    add("--jobs", type=entry.number(int, 1), metavar="N", help=jobs)
    add("--gpus", metavar="0,1,...", help="the GPUs to use [all]; each cell gets its own")
    stale = "stale runs: start over (the old folder is renamed), or count them as finished"
    add("--stale", choices=("rerun", "keep"), help=stale)
    slurm = "print the command that runs the unfinished cells as an array job"
    add("--slurm", action="store_true", help=slurm)
    return parser.parse_args(argv)


@entry.reports
def main(argv: list[str] | None = None) -> int:
    """Run the cells of the grid, and return the exit code."""
    # See the module docstring.
    args = parse_arguments(argv)
    try:
        grid = read_grid(args.grid, dict(args.set))
        if grid.about.tokenizer and not args.list:
            _train_tokenizer(grid, grid.about.tokenizer)
        cells = [
            cell for number, cell in enumerate(grid.cells)
            if args.cell in (None, number)
            and any(fnmatch(cell.name, pattern) for pattern in args.only or ["*"])
        ]  # fmt: skip
    except ConfigError as error:
        entry.refuse(str(error), 2)
    if not cells:
        entry.refuse(f"no cell matches; the first is named {grid.cells[0].name}", 2)
    if args.list:
        return _list(cells, grid)
    states = {cell.name: state_of(cell) for cell in cells}
    stale = [cell for cell in cells if states[cell.name][0] == "stale"]
    done = ("finished",) if args.stale == "rerun" and not args.slurm else ("finished", "stale")
    left = [cell for cell in cells if states[cell.name][0] not in done]
    for cell in stale:
        print(f"{cell.name}: STALE: {states[cell.name][1]}")
    if args.slurm:
        print(_array_job(args, grid, left) if left else "no cell is left")
        return 0
    print(f"{len(cells) - len(left)} of {len(cells)} cells are done or stale", flush=True)
    return _run(args, grid, left, stale=bool(stale) and args.stale is None)


def _train_tokenizer(grid: Grid, wanted: TrainedTokenizer) -> None:
    """Train the tokenizer of a grid, if the tokenizer's file is missing."""
    file, text = (filled(each, grid.variables) for each in (wanted.file, wanted.text))
    if not Path(file).exists():
        print(f"training a tokenizer on {text}: {file}", flush=True)
        train_tokenizer([text], wanted.size, Path(file))


def _list(cells: list[Cell], grid: Grid) -> int:
    """List the runs of a grid with their states or config problems; return the exit code."""
    wrong = 0
    for cell in cells:
        try:
            cell.config()
            text = ": ".join(filter(None, state_of(cell)))
        except ConfigError as error:
            wrong, text = wrong + 1, str(error)
        print(f"{cell.name:<48} {text}")
    print(f"{len(cells)} cells in {grid.runs}" + (f", {wrong} with problems" if wrong else ""))
    return 2 if wrong else 0


def _run(args: argparse.Namespace, grid: Grid, left: list[Cell], *, stale: bool) -> int:
    runner = Runner(
        _devices(args, grid.about.processes),
        lambda text: print(text, flush=True),
        lambda: write_index(grid.cells, grid.runs),
    )
    runner.rerun = args.stale == "rerun"
    for number in SIGNALS:
        signal.signal(number, runner.receive)
    runner.run(left)
    counts = write_index(grid.cells, grid.runs)["state"].value_counts()
    print(f"{grid.runs}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
    if runner.failed:
        print("failed: " + ", ".join(cell.name for cell in runner.failed))
    if runner.left:
        print("left to other jobs: " + ", ".join(cell.name for cell in runner.left))
    if stale:
        print("stale cells are left as they are: give --stale rerun or --stale keep")
    return entry.INTERRUPTED if runner.signals else int(bool(runner.failed or runner.left) or stale)


def _devices(args: argparse.Namespace, processes: int) -> list[str]:
    """Return one value of CUDA_VISIBLE_DEVICES for each run that may be active at the same time.

    Args:
        args: The parsed command line.
        processes: The number of processes of each run. Each process gets one GPU.
    """
    import torch

    named = args.gpus or os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]
    if not gpus or named == "-1":
        return [""] * (args.jobs or 1)
    groups = [gpus[i : i + processes] for i in range(0, len(gpus), processes)]
    whole = [",".join(group) for group in groups if len(group) == processes]
    if not whole:
        entry.refuse(f"a cell needs {processes} GPUs, and there are {len(gpus)}", 2)
    return whole[: args.jobs]


def _array_job(args: argparse.Namespace, grid: Grid, left: list[Cell]) -> str:
    numbers = ",".join(str(grid.cells.index(cell)) for cell in left)
    options = [text for pair in args.set for text in ("--set", "=".join(pair))]
    limit = f"%{args.jobs}" if args.jobs else ""
    command = ["sbatch", f"--array={numbers}{limit}", f"--gpus-per-node={grid.about.processes}"]
    command += ["tools/slurm/sweep.sbatch", str(args.grid), *options]
    return shlex.join(command)


if __name__ == "__main__":
    entry.run(main)
