"""Count in which of the arena's runs the paper's orders hold (plan_arena.md).

    python docs/lab/arena_claims.py docs/results/arena docs/results/arena_prose

The claims are in tables/arena_claims.csv. Each folder contains a `runs.csv` of arena.py, for one
text. The script writes `claims.csv` into the first folder: for each claim the number of seeds with
which it holds on that text, the mean difference of the two sides in nats, and the verdict; then
the same number for each other text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from arena import SEEDS
from recipe import perplexities

CLAIMS = Path(__file__).parent / "tables" / "arena_claims.csv"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", help="folders with runs.csv of arena.py")
    folders = parser.parse_args(arguments).folders
    texts = {folder.name: pd.read_csv(folder / "runs.csv") for folder in folders}
    found = judged(pd.read_csv(CLAIMS), texts)
    found.to_csv(folders[0] / "claims.csv", index=False, float_format="%.6g")
    print(found.to_string(index=False))
    return 0


def judged(claims: pd.DataFrame, texts: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return the claims, with the seeds for which they hold on each text, and the verdict.

    Args:
        claims: The table of claims.
        texts: Maps the name of each text to its runs. The verdict is that on the first text.
    """
    rows = []
    for claim in claims.to_dict("records"):
        gaps = [(side(runs, claim["higher"]) - side(runs, claim["lower"])).dropna()
                for runs in texts.values()]  # fmt: skip
        first, holds = gaps[0], int((gaps[0] > 0).sum())
        verdict = {SEEDS: "supported", 0: "contradicted"}.get(holds, "undecided")
        complete = len(first) == SEEDS
        claim |= {"difference": first.mean(), "verdict": verdict if complete else "incomplete"}
        for name, each in zip(texts, gaps, strict=True):
            claim[name] = f"{(each > 0).sum()} of {len(each)}"
        rows.append(claim)
    return pd.DataFrame(rows)


def side(runs: pd.DataFrame, text: str) -> pd.Series:
    """Return the log perplexity of one side of a claim, or its change with the length, by seed.

    The perplexity of `METHOD`, without a length, is that beyond the training length, divided by
    itself. So it is 1, and that of `windowed twin of METHOD` is exp(gain).

    Args:
        runs: The runs on one text.
        text: `METHOD at LENGTH`, `change of METHOD`, `METHOD` or `windowed twin of METHOD`.
    """
    what, _, name = text.rpartition(" of ")
    name, _, length = name.partition(" at ")
    method = runs[runs.method == name].set_index("seed")
    if what == "change":
        shortest, *_, longest = perplexities(runs)
        return np.log(method[longest] / method[shortest])
    if length:
        return np.log(method[f"perplexity_{length}"])
    return method.gain if what else 0 * method.gain


if __name__ == "__main__":
    sys.exit(main())
