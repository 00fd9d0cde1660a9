"""Measure the runs of the study of retrofits (plan_retrofit.md), and write its tables and picture.

    python docs/lab/retrofit.py configs/paper/retrofit.yml --out docs/results/retrofit

The suite is run on each finished run, at 1 to 16 times the training length. A run that has a report
already is not measured again, and a run that is not finished is named. The runs of the method
`more` are measured a second time, with each layer limited to the training length: the method
`window`. Rows of an earlier `retrofit.csv` stay, so the seeds may be run one after another.

`retrofit.csv` has a row for each run, and `differences.csv` compares each method with `more` and
`window`, paired by seed. `verdicts.csv` has the plan's two primary tests. The pictures show the
perplexity by length of each method, and the gain over the windowed twin of each run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from recipe import (
    TIMES,
    by_length,
    finished_cells,
    found_by_suite,
    measure,
    perplexities,
    with_earlier,
)
from scipy.stats import t, ttest_1samp

from megatron import pictures
from tools.experiments.claims import holm
from tools.experiments.grid import Cell

REFERENCES = ("more", "window")
PRIMARY = "rotary_kerple_log"
SEEDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("grid", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables and picture")
    given = parser.parse_args(arguments)
    rows = [row for cell in finished_cells(given.grid) for row in rows_of(cell)]
    if not rows:
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    table = with_earlier(pd.DataFrame(rows), given.out / "retrofit.csv", ["method"])
    table.to_csv(given.out / "retrofit.csv", index=False, float_format="%.6g")
    compared = pd.DataFrame(differences(table))
    compared.to_csv(given.out / "differences.csv", index=False, float_format="%.4g")
    print(table.to_string(index=False), compared.to_string(index=False), sep="\n\n")
    if {PRIMARY, "window"} <= set(table.method):
        decided = decide(table)
        decided.to_csv(given.out / "verdicts.csv", index=False, float_format="%.4g")
        print("", decided.to_string(index=False), sep="\n")
    pictures.save(
        by_length(table, "Perplexity by length after a retrofit"), given.out / "by_length.png"
    )
    pictures.save(gains(table), given.out / "gain.png")
    return 0


def rows_of(cell: Cell) -> Iterator[dict[str, Any]]:
    """Measure a run, if it has no report, and yield its row; for "more", also that of "window"."""
    length = cell.config().model.seq_length
    methods = {str(cell.axes["method"]): ()}
    if "more" in methods:
        methods["window"] = (f"sliding_window_width={length - 1}",)
    for name, overrides in methods.items():
        folder = cell.folder / ("suite_window" if overrides else "suite")
        measure(cell, folder, overrides)
        found = found_by_suite(folder)
        values = {row["length"]: row["value"] for row in found["by_length"]["rows"]}
        twin = found["pointer"]["rows"][0]
        yield {
            "method": name,
            "seed": cell.seed,
            **{f"perplexity_{n}": values[n] for n in (time * length for time in TIMES)},
            "gain": twin["taken"],
            "gain_low": twin["taken_low"],
            "gain_high": twin["taken_high"],
            "documents": twin["documents"],
            "copy": found["copy"]["answer"],
            "induction": found["induction"]["answer"],
        }


def differences(table: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield, for each method and reference, the mean differences paired by seed.

    The difference of perplexities is that of their logarithms, in percent. `low` and `high` are
    95% t intervals over seeds. `p_below` (of the perplexity) and `p_above` (of the gain) are
    one-sided.
    """
    values = by_seed(table)
    for name in dict.fromkeys(table.method):
        for reference in REFERENCES:
            if name == reference or reference not in values.index:
                continue
            both = (values.loc[name] - values.loc[reference]).dropna()
            row = {"method": name, "than": reference, "seeds": len(both)}
            for key, side in (("ppl", "less"), ("gain", "greater")):
                mean, low, high = interval(both[key])
                p = ttest_1samp(both[key], 0, alternative=side).pvalue
                row |= {key: mean, f"{key}_low": low, f"{key}_high": high, f"{key}_p": p}
            yield row


def by_seed(table: pd.DataFrame) -> pd.DataFrame:
    """Return 100 times the log perplexity at the longest length, and the gain, by method, seed."""
    farthest = perplexities(table)[-1]
    rows = table.set_index(["method", "seed"])
    kept = rows[["gain", "gain_low"]]
    return kept.assign(ppl=rows[farthest].map(math.log) * 100)


def decide(table: pd.DataFrame) -> pd.DataFrame:
    """Return the plan's two primary tests, each with its p value after Holm's correction.

    Both are one-sided t tests over seeds, and need all three seeds. The first has the p value 1
    unless the interval over documents of each seed excludes 0. `mean` is in nats per token in the
    first test, and in percent in the second.
    """
    values = by_seed(table)
    new = values.loc[PRIMARY]
    below = (new.ppl - values.loc["window"].ppl).dropna()
    tests = {
        "the gain is above 0": (new.gain, "greater", bool((new.gain_low > 0).all())),
        "the perplexity is below that of window": (below, "less", True),
    }
    p_values = [
        float(ttest_1samp(each, 0, alternative=side).pvalue) if every_seed else 1.0
        for each, side, every_seed in tests.values()
    ]
    rows = [
        {"test": f"{PRIMARY}: {name}", "seeds": len(each), "mean": each.mean(), "p": p,
         "holm": adjusted, "holds": adjusted < 0.05 and len(each) == SEEDS}
        for (name, (each, *_)), p, adjusted in zip(
            tests.items(), p_values, holm(p_values), strict=True
        )
    ]  # fmt: skip
    return pd.DataFrame(rows)


def interval(values: pd.Series) -> tuple[float, float, float]:
    """Return (mean, low, high) with a 95% t interval; low and high are NaN for a single value."""
    n = len(values)
    half = t.ppf(0.975, n - 1) * values.std() / math.sqrt(n) if n > 1 else math.nan
    return values.mean(), values.mean() - half, values.mean() + half


@pictures.in_style()
def gains(table: pd.DataFrame) -> Any:
    """Draw the gain over the windowed twin: a dot for each run, with its interval, and the mean."""
    figure, (axes,) = pictures.panels("Gain over the windowed twin after a retrofit")
    names = list(dict.fromkeys(table.method))
    for place, name in enumerate(names):
        runs = table[table.method == name]
        for shift, run in zip((-0.2, 0, 0.2), runs.itertuples(), strict=False):
            error = [[max(0, run.gain - run.gain_low)], [max(0, run.gain_high - run.gain)]]
            axes.errorbar(run.gain, place + shift, xerr=error, marker="o", ms=4, color="C0")
        axes.plot(runs.gain.mean(), place, marker="|", ms=24, color="C1")
    axes.axvline(0, color="grey", lw=1)
    axes.set(xlabel="nats per token, each seed with its 95% interval over documents; line: mean")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    return figure


if __name__ == "__main__":
    sys.exit(main())
