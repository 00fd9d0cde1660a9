"""Say which of the paper's claims hold in the arena's runs (plan_arena.md).

    cd docs/results
    python ../lab/arena_claims.py arena arena_prose arena_latex

The claims are in tables/arena_claims.csv. Each folder contains a `runs.csv` of arena.py, for one
text. The script writes `claims.csv` into the first folder: for each claim the number of runs with
which it holds, of how many, and the verdict.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from recipe import perplexities

CLAIMS = Path(__file__).parent / "tables" / "arena_claims.csv"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", help="folders with runs.csv of arena.py")
    folders = parser.parse_args(arguments).folders
    runs = [pd.read_csv(folder / "runs.csv") for folder in folders]
    found = judged(pd.read_csv(CLAIMS), runs)
    found.to_csv(folders[0] / "claims.csv", index=False)
    print(found.to_string(index=False))
    return 0


def judged(claims: pd.DataFrame, texts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the claims with columns for the runs in which they hold, all runs and the verdict.

    Args:
        claims: The table of claims.
        texts: The runs on each text, which are compared with runs on the same text only.
    """
    rows = []
    for _, claim in claims.iterrows():
        lower, higher = claim["lower"], claim["higher"]
        gaps = pd.concat([side(runs, higher) - side(runs, lower) for runs in texts]).dropna()
        holds = int((gaps > 0).sum())
        verdict = {len(gaps): "supported", 0: "contradicted"}.get(holds, "undecided")
        judged_so = {"holds": holds, "runs": len(gaps), "verdict": verdict if len(gaps) else ""}
        rows.append(claim.to_dict() | judged_so)
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
