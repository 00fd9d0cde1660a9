"""Compare the seconds per step of a grid's runs with the paper's Tables 4 and 7.

    python docs/lab/seconds_per_step.py configs/paper/seconds_per_step.yml --out DIR

The value of a run is the median of its log's `train/seconds_per_step`, after the first 20
steps. The paper's runs had one A100 of 40 GB, so only ratios can be compared: the table has
the ratio to `kerple_log`, the paper's seconds and the paper's ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from megatron.run_folder import RunFolder
from tools.experiments.grid import read_grid

SECONDS = "train/seconds_per_step"
WARM_UP = 20
"""Steps at the start of a run that are left out."""
PAPER = {
    "kerple_log": 0.307, "kerple_power": 0.321, "alibi": 0.302, "rpe": 0.340, "rotary": 0.332,
    "sinusoidal": 0.298, "gaussian_mul": 0.326, "kerple_power_mul": 0.327, "gaussian": 0.324,
    "gaussian3": 0.351,
}  # fmt: skip
"""Tables 4 and 7 of arXiv 2205.09921, read from a text version of the paper."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("grid", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for the table")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args(arguments)
    cells = read_grid(given.grid, dict(each.split("=", 1) for each in given.set)).cells
    found = {cell.axes["embedding"]: seconds(cell.folder) for cell in cells}
    for name in [name for name, value in found.items() if value is None]:
        print(f"{name} has no step after step {WARM_UP}", file=sys.stderr)
        del found[name]
    if "kerple_log" not in found:
        print("kerple_log, to which the ratios refer, was not measured", file=sys.stderr)
        return 1
    table = pd.DataFrame({"seconds": pd.Series(found)}).rename_axis("embedding")
    table["ratio"] = table.seconds / table.seconds["kerple_log"]
    table["paper_seconds"] = pd.Series(PAPER)
    table["paper_ratio"] = table.paper_seconds / PAPER["kerple_log"]
    given.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(given.out / "seconds_per_step.csv", float_format="%.4g")
    print(table.round(3).to_string())
    return 0


def seconds(run: Path) -> float | None:
    """Return the median of the seconds per step of a run, or None if it has too few steps."""
    rows = [row for row in RunFolder(run).metrics_rows() if row["step"] > WARM_UP]
    values = [row[SECONDS] for row in rows if SECONDS in row]
    return statistics.median(values) if values else None


if __name__ == "__main__":
    sys.exit(main())
