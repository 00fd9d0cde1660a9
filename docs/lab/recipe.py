"""Measure the runs of the study of recipes (plan_recipe.md), and write their table and picture.

    python docs/lab/recipe.py configs/paper/recipe_screen.yml --out docs/results/recipe_screen
    python docs/lab/recipe.py configs/paper/recipe_dose.yml --out docs/results/recipe_dose

The suite is run on each finished cell of the grid, at 1 to 16 times the cell's training length. A
cell that has a suite report already is not measured again, and a cell that is not finished is
named. Rows of an earlier `recipes.csv` stay, so the embeddings may be run one after another.
`recipes.csv` has a row for each cell: gain, headroom and share with their intervals, recall,
and the change of perplexity with the length. For a grid with doses, `verdicts.csv` says for which
of them the plan's criteria R1 and R2 hold.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import ttest_1samp

from megatron import pictures
from megatron.config import load_config
from megatron.evaluation.suite.all_measures import run_suite
from megatron.evaluation.suite.suite_report import DATA
from megatron.run_folder import RunFolder
from tools.experiments.grid import Cell, read_grid
from tools.experiments.state import Record

TIMES = (1, 2, 4, 8, 16)
"""The lengths of the suite, as multiples of the training length W."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("grid", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and picture")
    args = parser.parse_args()
    found = []
    for cell in finished_cells(args.grid):
        measure(cell, RunFolder(cell.folder).suite)
        found.append(row(cell))
    if not found:
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    axes = list(found[0])[: list(found[0]).index("seed")]
    table = with_earlier(pd.DataFrame(found), args.out / "recipes.csv", axes)
    table.to_csv(args.out / "recipes.csv", index=False, float_format="%.6g")
    picture = by_dose(table) if "dose" in table else drawn(table, args.grid.stem)
    pictures.save(picture, args.out / "share.png")
    print(table.to_string(index=False))
    if "dose" in table:
        decided = decide(table)
        decided.to_csv(args.out / "verdicts.csv", index=False, float_format="%.4g")
        print(decided.to_string(index=False))
    return 0


def finished_cells(grid: Path, variables: Mapping[str, str] | None = None) -> Iterator[Cell]:
    """Yield the finished cells of a grid, and name the others.

    Args:
        variables: New values of the grid's variables.
    """
    for cell in read_grid(grid, variables or {}).cells:
        record = Record.read(cell.folder)
        if record is None or record.state != "finished":
            print(f"{cell.name} is not finished", file=sys.stderr)
        else:
            yield cell


def with_earlier(table: pd.DataFrame, path: Path, axes: Sequence[str]) -> pd.DataFrame:
    """Return `table` and the rows of the CSV file `path` for other runs.

    The rows are ordered by each axis, whose values are in the order in which they first appear, and
    then by seed.

    Args:
        axes: The columns that, with the seed, name a run.

    Raises:
        ValueError: The file has other columns.
    """
    earlier = pd.read_csv(path, dtype=dict.fromkeys(axes, str)) if path.exists() else table[:0]
    if [*earlier] != [*table]:
        raise ValueError(f"{path} has other columns: move it away")
    both = pd.concat([earlier, table], ignore_index=True)
    order = both[["seed"]].assign(**{axis: pd.factorize(both[axis])[0] for axis in axes})
    both = both.drop_duplicates([*axes, "seed"], keep="last")
    if kept := len(both) - len(table):
        print(f"{path}: {kept} rows of other runs are kept", file=sys.stderr)
    order = order.loc[both.index].sort_values([*axes, "seed"])
    return both.loc[order.index].reset_index(drop=True)


def measure(cell: Cell, folder: Path, overrides: Sequence[str] = ()) -> None:
    """Run the suite on a cell, unless `folder` has its report.

    Args:
        overrides: Config keys of this measurement, such as "sliding_window_width=127".
    """
    if (folder / DATA).exists():  # the suite writes this file last
        return
    length = cell.config().model.seq_length
    lengths = f"eval_lengths={[times * length for times in TIMES]}"
    config = load_config(cell.configs, [*cell.overrides, lengths, *overrides])
    run_suite(config, cell.folder, out=folder)


def found_by_suite(folder: Path) -> dict[str, Any]:
    """Return the measures in the suite's report."""
    return json.loads((folder / DATA).read_text())["measures"]


def row(cell: Cell) -> dict[str, Any]:
    """Return the results of a cell as the plan defines them."""
    found = found_by_suite(RunFolder(cell.folder).suite)
    length = cell.config().model.seq_length
    pointer = found["pointer"]["rows"][0]
    by_length = {each["length"]: each["value"] for each in found["by_length"]["rows"]}
    return {
        **cell.axes,
        "seed": cell.seed,
        "W": length,
        "perplexity_W": by_length[length],
        "perplexity_16W": by_length[TIMES[-1] * length],
        "change": by_length[TIMES[-1] * length] / by_length[length] - 1,
        "documents": pointer["documents"],
        "gain": pointer["taken"],
        "gain_low": pointer["taken_low"],
        "gain_high": pointer["taken_high"],
        "headroom": pointer["value"],
        "headroom_low": pointer["low"],
        "headroom_high": pointer["high"],
        "headroom_alone": pointer["alone"],
        "share": pointer["taken"] / pointer["value"],
        "share_low": pointer.get("share_low"),
        "share_high": pointer.get("share_high"),
        "copy": found["copy"]["answer"],
        "induction": found["induction"]["answer"],
        "verdict": found["windowed_twin"]["answer"],
    }


def decide(table: pd.DataFrame) -> pd.DataFrame:
    """Return, for each dose and embedding, whether R1 and R2 of the plan hold.

    R1 needs a p value below 2.5% (one-sided t test over seeds that the gain is above 0; Holm's
    first step of two), and an interval of each seed that excludes 0. R2 needs a mean share of at
    least 30%, and a headroom whose interval excludes 0. Only `kerple_log` with three seeds and at
    most 5,600 steps can pass.
    """
    rows = []
    for (dose, name), group in table.groupby(["dose", "embedding"], sort=False):
        several = len(group) > 1
        p = ttest_1samp(group.gain, 0, alternative="greater").pvalue if several else math.nan
        r1 = bool(p < 0.025 and (group.gain_low > 0).all())
        r2 = bool(group.share.mean() >= 0.3 and (group.headroom_low > 0).all())
        counts = name == "kerple_log" and int(dose) <= 5600 and len(group) == 3
        rows.append(
            {"dose": dose, "embedding": name, "seeds": len(group), "gain": group.gain.mean(),
             "p": p, "share": group.share.mean(), "change": group.change.mean(),
             "R1": r1, "R2": r2, "passes": r1 and r2 and counts}
        )  # fmt: skip
    return pd.DataFrame(rows)


def perplexities(table: pd.DataFrame) -> list[str]:
    """Return the names of the columns `perplexity_LENGTH`, from the shortest length."""
    return [name for name in table if name.startswith("perplexity_")]


@pictures.in_style()
def by_length(table: pd.DataFrame, title: str) -> Any:
    """Draw the mean perplexity by length of each method."""
    columns = perplexities(table)
    lengths = [int(name.removeprefix("perplexity_")) for name in columns]
    means = table.groupby("method", sort=False)[columns].mean()
    groups = pictures.divided([*means.iterrows()])
    figure, plots = pictures.panels(title, len(groups))
    for axes, group in zip(plots, groups, strict=True):
        for name, row in group:
            axes.plot(lengths, row, label=name)
        axes.set(xlabel="length (tokens)", ylabel="perplexity", xscale="log", yscale="log")
        pictures.plain_ticks(axes.xaxis, lengths[0], lengths[-1])
        pictures.plain_ticks(axes.yaxis, means.min().min(), means.max().max())
    pictures.label_lines(plots)
    return figure


@pictures.in_style()
def by_dose(table: pd.DataFrame) -> Any:
    """Draw the share by the number of steps: the mean of each embedding, and a dot for each run."""
    figure, (axes,) = pictures.panels("Share of the pointer's gain that the model takes, by steps")
    for place, (name, group) in enumerate(table.groupby("embedding", sort=False)):
        steps, colour = group.dose.astype(int), f"C{place}"
        mean = group.share.groupby(steps).mean()
        axes.plot(mean.index, mean, color=colour, label=name, marker="")
        axes.plot(steps, group.share, ls="", marker="o", ms=4, color=colour)
    axes.axhline(0.3, color="grey", lw=1, label="criterion R2")
    axes.set(xlabel="steps of 2,048 tokens", ylabel="share", xscale="log")
    pictures.plain_ticks(axes.xaxis, 700, 5600)
    axes.set_xticks(sorted(set(table.dose.astype(int))))
    axes.margins(y=0.05)
    axes.legend()
    return figure


@pictures.in_style()
def drawn(table: pd.DataFrame, title: str) -> Any:
    """Draw the share of the headroom that each model takes, with its interval."""
    figure, (axes,) = pictures.panels(f"Share of the pointer's gain that the model takes: {title}")
    names = list(dict.fromkeys(table.embedding))
    for place, (name, share, low, high) in enumerate(shares(table)):
        colour, known = f"C{names.index(table.embedding[place])}", high > low
        error = [[max(0, share - low)], [max(0, high - share)]] if known else None
        face = colour if known else "none"  # hollow: without an interval
        axes.errorbar(share, place, xerr=error, marker="o", capsize=3, color=colour, mfc=face)
        axes.annotate(name, (high, place), xytext=(8, 0), textcoords="offset points", va="center")
    axes.axvline(0, color="grey", lw=1)
    axes.set(xlabel="share (95% interval over documents, where there are enough)", yticks=[])
    axes.margins(x=0.3)
    axes.invert_yaxis()
    return figure


def shares(table: pd.DataFrame) -> Iterator[tuple[str, float, float, float]]:
    """Yield (name, share, low, high) of each cell. Without an interval, all three are the share."""
    for each in table.to_dict("records"):
        axes = [str(value) for value in list(each.values())[: list(each).index("W")]]
        low, high = (
            each["share"] if pd.isna(each[key]) else each[key]
            for key in ("share_low", "share_high")
        )
        yield f"{' '.join(axes[:-1])}, seed {axes[-1]}", each["share"], low, high


if __name__ == "__main__":
    sys.exit(main())
