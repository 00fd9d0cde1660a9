"""Write the tables of the arena's page from its results (arena_results.md).

    python docs/lab/arena_page.py docs/results/arena docs/results/arena_prose
    python docs/lab/lab_tables.py

The first folder contains `runs.csv` and `methods.csv` of arena.py with `--tests`, and `claims.csv`
of arena_claims.py. Each other folder contains a `runs.csv`, for one other text. The tables are in
docs/lab/tables; lab_tables.py copies them into the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from arena_texts import SEED, gains_by_text, texts_of
from recipe import perplexities

TABLES = Path(__file__).parent / "tables"
P_VALUES = {
    "smaller gain above 0": "gain_p",
    "smaller gain differs from that of `kerple_log`": "gain_differs_p",
    "level differs from that of `kerple_log`": "level_differs_p",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", help="folders with the results on a text")
    folders = parser.parse_args(arguments).folders
    folder = folders[0]
    runs, methods, claims = (
        pd.read_csv(folder / f"{name}.csv") for name in ("runs", "methods", "claims")
    )
    tables = {
        "arena_gains": gains(methods),
        "arena_models": models(methods, runs),
        "arena_p_values": p_values(methods),
        "arena_verdicts": verdicts(claims),
    }
    if len(folders) > 1:
        texts = texts_of(folders)
        tables["arena_other_gains"] = gains_on_texts(texts)
        tables["arena_other_models"] = models_on_texts(texts)
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
            **{f"on {name}": texts[name].replace("0 of 0", "") for name in others},
        }
    )


def gains_on_texts(texts: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return each method's smaller gain on each text, and on which side of 0 both intervals are.

    Args:
        texts: Maps the name of each text to its runs. The first text decides the order. Only the
            methods that were run on each text are in the table.
    """
    least = gains_by_text(texts).dropna()
    least = least.sort_values(least.columns[0], ascending=False)
    shown = {"method": named(least.reset_index())}
    for name, runs in texts.items():
        of_seed = runs[runs.seed == SEED].set_index("method").loc[least.index]
        above = (of_seed[["gain_low", "exact_low"]] > 0).all(axis=1)
        below = (of_seed[["gain_high", "exact_high"]] < 0).all(axis=1)
        shown[f"on {name}"] = [*least[name].map("{:.4f}".format)]
        shown[f"intervals on {name}"] = [*np.select([above, below], ["above 0", "below 0"], "")]
    return pd.DataFrame(shown)


def models_on_texts(texts: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return each method's perplexities and recall on the other texts, in the same order."""
    order = gains_by_text(texts).dropna().sort_values([*texts][0], ascending=False).index
    shown = {"method": named(order.to_frame())}
    for name, runs in [*texts.items()][1:]:
        runs = runs[runs.seed == SEED].set_index("method").loc[order]
        shortest, *_, longest = perplexities(runs)
        for column in (shortest, longest):
            length = int(column.removeprefix("perplexity_"))
            shown[f"{name}: perplexity at {length:,}"] = runs[column].map(perplexity)
        shown[f"{name}: places"] = runs.places
    return pd.DataFrame(shown)


def perplexity(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def named(methods: pd.DataFrame) -> pd.Series:
    return methods.method.map(lambda name: f"`{name.replace('+', ' + ')}`")


if __name__ == "__main__":
    sys.exit(main())
