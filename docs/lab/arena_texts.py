"""Choose the arena's methods for other text, and compare the gains on all texts (plan_arena.md).

    python docs/lab/arena_texts.py docs/results/arena docs/results/arena_prose

Each folder contains a `runs.csv` of arena.py, for one text. The script prints the methods that the
plan chooses by the runs in the first folder. With more folders, it writes `texts.csv` into the
first: Spearman's rank correlation between the gains on the first text and on each other text. The
picture `texts.png` shows these gains. A gain here is the smaller of a run's two gains.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from arena import SEEDS, compared, with_derived
from arena_pictures import on_texts
from scipy.stats import spearmanr

from megatron import pictures

PAPER = ["kerple_log", "kerple_power", "alibi", "rpe", "rotary", "sinusoidal"]
BEST = 5
SEED = 1246
"""The seed of the runs on other text. The choice does not rank methods by it."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", help="folders with runs.csv of arena.py")
    folders = parser.parse_args(arguments).folders
    first, texts = folders[0], texts_of(folders)
    print("methods for other text:", *chosen(texts["code"]))
    if len(texts) > 1:
        gains = gains_by_text(texts)
        labels = compared(texts["code"]).set_index("method").label
        found = pd.DataFrame([correlation(gains, labels, name) for name in gains.columns[1:]])
        pictures.save(on_texts(gains), first / "texts.png")
        found.to_csv(first / "texts.csv", index=False, float_format="%.6g")
        print(found.to_string(index=False))
    return 0


def texts_of(folders: Sequence[Path]) -> dict[str, pd.DataFrame]:
    """Return the runs of each text. The first is code, the others are named after their folder."""
    code, *others = folders
    named = {"code": code, **{folder.name.removeprefix("arena_"): folder for folder in others}}
    return {name: pd.read_csv(folder / "runs.csv") for name, folder in named.items()}


def chosen(runs: pd.DataFrame) -> list[str]:
    """Return the paper's embeddings, and the best methods by the other seeds' smaller gains."""
    methods = compared(runs).set_index("method")
    may = methods.index[(methods.seeds == SEEDS) & (methods.label != "loses")]
    values = with_derived(runs)
    counted = values[(values.seed != SEED) & values.method.isin(may)]
    least = counted.groupby("method").least.mean().sort_values(ascending=False)
    return list(dict.fromkeys([*PAPER, *least.index[:BEST]]))


def gains_by_text(texts: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the smaller gain of each method (rows) on each text (columns), of one seed."""
    values = {name: with_derived(runs).set_index("method") for name, runs in texts.items()}
    return pd.DataFrame({name: each[each.seed == SEED].least for name, each in values.items()})


def correlation(gains: pd.DataFrame, labels: pd.Series, text: str) -> dict[str, object]:
    """Return the rank correlation of the gains on code and a text, with and without losing methods.

    Args:
        gains: The gain of each method on each text.
        labels: The label of each method on code.
        text: The name of the text.
    """
    both = gains[["code", text]].dropna()
    kept = both[labels[both.index] != "loses"]
    found = {"text": text, "methods": len(both), "rho": spearmanr(both.code, both[text])[0]}
    rho = spearmanr(kept.code, kept[text])[0]
    return found | {"methods that do not lose": len(kept), "their rho": rho}


if __name__ == "__main__":
    sys.exit(main())
