"""Choose the arena's methods for other text, and compare the gains on all texts (plan_arena.md).

    python docs/lab/arena_texts.py docs/results/arena docs/results/arena_prose

Each folder contains a `runs.csv` of arena.py, for one text. The script prints the methods that the
plan chooses by the runs in the first folder. With more folders, it writes `texts.csv` into the
first: Spearman's rank correlation between the gains on the first text and on each other text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from arena import SEEDS, compared
from scipy.stats import spearmanr

PAPER = ["kerple_log", "kerple_power", "alibi", "rpe", "rotary", "sinusoidal"]
BEST = 5
SEED = 1246
"""The seed of the runs on other text. The choice does not rank methods by it."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", help="folders with runs.csv of arena.py")
    first, *others = parser.parse_args(arguments).folders
    runs = pd.read_csv(first / "runs.csv")
    print("methods for other text:", *chosen(runs))
    if others:
        texts = {folder.name: pd.read_csv(folder / "runs.csv") for folder in others}
        found = pd.DataFrame([correlation(runs, text, name) for name, text in texts.items()])
        found.to_csv(first / "texts.csv", index=False, float_format="%.3g")
        print(found.to_string(index=False))
    return 0


def chosen(runs: pd.DataFrame) -> list[str]:
    """Return the paper's embeddings, and the best methods by the gain of the other seeds."""
    methods = compared(runs).set_index("method")
    may = methods.index[(methods.seeds == SEEDS) & (methods.label != "loses")]
    counted = runs[(runs.seed != SEED) & runs.method.isin(may)]
    gain = counted.groupby("method").gain.mean().sort_values(ascending=False)
    return list(dict.fromkeys([*PAPER, *gain.index[:BEST]]))


def correlation(code: pd.DataFrame, text: pd.DataFrame, name: str) -> dict[str, object]:
    """Return the rank correlation of the gains of one seed, with and without losing methods."""
    gains = pd.concat(
        {of: runs[runs.seed == SEED].set_index("method").gain for of, runs in
         (("code", code), ("text", text))}, axis=1, join="inner"
    )  # fmt: skip
    labels = compared(code).set_index("method").label
    kept = gains[labels[gains.index] != "loses"]
    found = {"text": name, "methods": len(gains), "rho": spearmanr(gains.code, gains.text)[0]}
    rho = spearmanr(kept.code, kept.text)[0]
    return found | {"methods that do not lose": len(kept), "their rho": rho}


if __name__ == "__main__":
    sys.exit(main())
