"""Write the tables of the arena's page from its results (arena_results.md).

    python docs/lab/arena_page.py docs/results/arena
    python docs/lab/lab_tables.py

The folder contains `runs.csv` and `methods.csv` of arena.py with `--tests`, and `claims.csv` of
arena_claims.py. The tables are in docs/lab/tables; lab_tables.py copies them into the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from recipe import perplexities

TABLES = Path(__file__).parent / "tables"
P_VALUES = {
    "smaller gain above 0": "gain_p",
    "smaller gain differs from that of `kerple_log`": "gain_differs_p",
    "level differs from that of `kerple_log`": "level_differs_p",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with the results on code")
    folder = parser.parse_args(arguments).folder
    runs, methods, claims = (
        pd.read_csv(folder / f"{name}.csv") for name in ("runs", "methods", "claims")
    )
    tables = {
        "arena_gains": gains(methods),
        "arena_models": models(methods, runs),
        "arena_p_values": p_values(methods),
        "arena_verdicts": verdicts(claims),
    }
    for name, table in tables.items():
        table.to_csv(TABLES / f"{name}.csv", index=False)
    return 0


def gains(methods: pd.DataFrame) -> pd.DataFrame:
    """Return a table of the gains: a row for each method, the largest smaller gain first."""
    return pd.DataFrame(
        {
            "method": named(methods),
            "label": methods.label.fillna(""),
            "gain": methods.gain.map("{:.4f}".format),
            "exact": methods.exact.map("{:.4f}".format),
            "smaller": methods.least.map("{:.4f}".format),
            "SD of smaller": methods.least_sd.map("{:.4f}".format),
            "share": methods.share.map("{:.0%}".format).replace("nan%", ""),
        }
    )


def models(methods: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return each method's perplexities (geometric means over seeds), recall and rate."""
    shortest, *_, longest = perplexities(runs)
    trained, most = (int(name.removeprefix("perplexity_")) for name in (shortest, longest))
    induction = runs.groupby("method").induction.apply(
        lambda each: ", ".join(f"{int(value):,}" for value in sorted(each))
    )
    return pd.DataFrame(
        {
            "method": named(methods),
            f"perplexity at {trained:,}": np.exp(methods.level).map(perplexity),
            f"perplexity at {most:,}": np.exp(methods.level + methods.change).map(perplexity),
            "change": methods.change.map("{:+.3f}".format),
            "places": methods.places.map("{:.1f}".format),
            "induction of each run": methods.method.map(induction),
            "rate": methods.rate,
        }
    )


def p_values(methods: pd.DataFrame) -> pd.DataFrame:
    """Return the corrected p values of the plan's tests; empty where a test was not made."""
    shown = {
        name: methods[column].map(lambda p: "" if np.isnan(p) else f"{p:.2g}")
        for name, column in P_VALUES.items()
    }
    return pd.DataFrame({"method": named(methods), **shown})


def verdicts(claims: pd.DataFrame) -> pd.DataFrame:
    """Return the claims with their verdicts, and the seeds for which they hold on each text."""
    place = claims.columns.get_loc("verdict")
    texts = {name.removeprefix("arena_"): claims[name] for name in claims.columns[place + 1 :]}
    code, *others = texts
    return pd.DataFrame(
        {
            **{name: claims[name] for name in ("claim", "lower", "higher", "in the paper")},
            "mean difference": claims.difference.map("{:.4f}".format),
            "on code": texts[code],
            "verdict": claims.verdict,
            **{f"on {name}": texts[name] for name in others},
        }
    )


def perplexity(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def named(methods: pd.DataFrame) -> pd.Series:
    return methods.method.map(lambda name: f"`{name.replace('+', ' + ')}`")


if __name__ == "__main__":
    sys.exit(main())
