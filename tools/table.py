"""Write the tables, tests and plots of a grid's runs, or of single run folders.

    python tools/table.py configs/paper/table3.yml --against paper --out results/table3
    python tools/table.py runs/a runs/b --out results/mine

With a grid file, the tool also tests the grid's endpoints (its claims), and writes a verdict on
each claim. Runs that are not finished are listed by name, and their results are left out. The tool
writes these files into the folder DIR of `--out DIR`: report.html (one file with the plots),
tables.md, tables.tex, results.csv, verdicts.csv, theta.csv (how far training moved the kernels'
parameters) and the plots.
"""

import argparse
import sys
from pathlib import Path

from megatron import entry
from megatron.config import ConfigError
from tools.experiments.description import METRICS
from tools.experiments.grid import read_grid


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = entry.parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="GRID.yml|RUN", help="one grid file, or run folders")
    add("--set", action="append", default=[], type=entry.assignment, metavar="NAME=VALUE",
        help="a variable of the grid")  # fmt: skip
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    add("--against", choices=("paper",), help="show the paper's numbers beside the cells")
    add("--metric", choices=tuple(METRICS), help="[the first of these that was measured]")
    args = parser.parse_args(argv)
    if len(args.runs) > 1 and not all(path.is_dir() for path in args.runs):
        parser.error("give one grid file, or only run folders")
    return args


@entry.reports
def main(argv: list[str] | None = None) -> int:
    """Write the results of a grid or of run folders, and return the exit code."""
    # Also print the tables, and the verdicts on a grid's claims if there are any.
    args = parse_arguments(argv)
    from tools.experiments import grid_report, moved_theta, results
    from tools.experiments.claims import verdicts
    from tools.experiments.report_head import head_of

    grid, judged, remarks, rows = None, [], [], "embedding"
    if args.runs[0].is_dir():
        found = results.of_folders(args.runs)
    else:
        try:
            grid = read_grid(args.runs[0], dict(args.set))
            found, remarks = results.of_grid(grid)
        except ConfigError as error:
            entry.refuse(str(error), 2)
        rows, judged = grid.rows, verdicts(grid, found)
    measured = [name for name in METRICS if name in set(found["metric"])]
    metric = args.metric or (measured or ["a length"])[0]
    if metric not in measured:
        entry.refuse(f"error: no finished run has measured {metric}; {'; '.join(remarks)}", 1)
    moved, unknown = moved_theta.of_runs(found)
    head = head_of(found, grid, sys.argv[1:] if argv is None else argv)
    against = args.against == "paper"
    parts = grid_report.sections(found, moved, rows, metric, grid, against, head["models"])
    tables = {"results.csv": found, "theta.csv": moved}
    written = grid_report.write(args.out, head, parts, judged, [*remarks, *unknown], tables)
    print((args.out / "tables.md").read_text(), end="")
    print(f"written: {', '.join(map(str, written))}")
    return 0


if __name__ == "__main__":
    entry.run(main)
