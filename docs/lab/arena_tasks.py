"""Score the arena's runs on length tasks, by the definitions of step 4 of plan_arena.md.

    out=docs/results/arena_tasks
    python tools/table.py configs/paper/arena_tasks.yml --metric exact --out $out
    python docs/lab/arena_tasks.py $out

The script reads `results.csv` in the given folder, and writes three files beside it: `scores.csv`
has a row for each run, `counts.csv` the numbers of runs that have learnt the task and that
generalize, and `scores.png` shows the mean score by length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from megatron import pictures

GUESSED = {"parity": 0.5}
"""The share of right answers of a model that guesses; 0 for the other tasks."""
LEARNT = 0.8
"""A run has learnt its task if its score at the longest trained length is at least this."""
KEPT = 0.5
"""It generalizes if it also keeps this part of the score at twice that length."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the folder with results.csv of tools/table.py")
    folder = parser.parse_args(arguments).folder
    runs = scored(pd.read_csv(folder / "results.csv"))
    runs.to_csv(folder / "scores.csv", index=False, float_format="%.4g")
    counts = counted(runs)
    counts.to_csv(folder / "counts.csv", index=False, float_format="%.4g")
    print(counts.to_string(index=False))
    pictures.save(drawn(runs), folder / "scores.png")
    return 0


def scored(results: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each run: scores by length, and whether it learnt and generalizes."""
    exact = results[results.metric == "exact"]
    runs = ["task", "embedding", "seed"]
    shares = exact.pivot_table("value", runs, "length", sort=False)
    guessed = shares.index.get_level_values("task").map(lambda task: GUESSED.get(task, 0.0))
    scores = shares.sub(guessed, axis=0).div(1 - guessed, axis=0).round(9)  # so 0.4 is half of 0.8
    trained, twice = sorted(scores)[:2]
    learnt = scores[trained] >= LEARNT
    generalizes = learnt & (scores[twice] >= KEPT * scores[trained])
    scores = scores.rename(columns=lambda length: f"score_{length}")
    return scores.assign(learnt=learnt, generalizes=generalizes).reset_index()


def counted(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers of runs and the mean scores of each task and embedding."""
    groups = runs.groupby(["task", "embedding"], sort=False)
    chosen = [name for name in runs if name.startswith("score_")]
    found = groups[["learnt", "generalizes"]].sum()
    found.insert(0, "runs", groups.size())
    return pd.concat([found, groups[chosen].mean()], axis=1).reset_index()


def drawn(runs: pd.DataFrame) -> Any:
    """Draw the mean score of each embedding by length, one plot for each task."""
    chosen = [name for name in runs if name.startswith("score_")]
    lengths = [int(name.removeprefix("score_")) for name in chosen]
    tasks = runs.groupby("task", sort=False)
    groups = [
        [pictures.Curve(str(name), lengths, one[chosen].mean())
         for name, one in group.groupby("embedding", sort=False)]
        for _, group in tasks
    ]  # fmt: skip
    title = f"Score on length tasks, trained at lengths 1 to {lengths[0]}"
    figure = pictures.by_length(title, groups, "length", "score (1: all right)", fit=False)
    for axes, (task, _) in zip(figure.axes, tasks, strict=True):
        axes.set_xlabel(f"length of {task}")
    return figure


if __name__ == "__main__":
    sys.exit(main())
