"""Test what the plan of the arena says of its length tasks, by the grid and by the results."""

from __future__ import annotations

import csv
import math

import pandas as pd
import pytest
import torch

from megatron.positional.rpe import Rpe
from tests.helpers.paths import ROOT
from tests.pages.figures.held import grid, says, word

LAB, PAGE = ROOT / "docs" / "lab", "lab/plan_arena"
ABOUT = grid("arena_tasks").about
EMBEDDINGS, TASKS = list(ABOUT.axes["embedding"]), list(ABOUT.axes["task"])
COPIES = [task for task in TASKS if "copy" in task]
FOUND = pd.read_csv(ROOT / "docs/results/arena_tasks/results.csv").query("metric == 'exact'")
RIGHT = FOUND.set_index(["task", "embedding", "seed", "length"]).value.sort_index()


def test_the_tasks_with_a_prediction():
    about, cells = grid("arena_tasks").about, grid("arena_tasks").cells
    configs = {cell.axes["task"]: cell.config() for cell in cells}
    tasks = {name: each.data for name, each in configs.items()}
    options = {name: each.task_options for name, each in tasks.items()}
    (longest,) = {each["max_length"] for each in options.values()}
    (steps,) = {each.training.train_iters for each in configs.values()}
    symbols = options["unique_copy"]["symbols"]

    def distinct(length: int) -> float:
        return math.perm(symbols, length) / symbols**length

    assert tasks["copy"].data_path == tasks["copy_64"].data_path == "builtin:copy"
    assert options["copy"] | {"symbols": symbols} == options["copy_64"] == options["unique_copy"]
    with (LAB / "tables" / "arena_tasks.csv").open(newline="") as file:
        table = {row["task"]: row["examples"] for row in csv.DictReader(file)}
    assert [*table] == [*about.axes["task"]]
    assert table["unique_copy"] == f"rows of different numbers below {symbols}"
    assert table["copy_64"] == f"rows of numbers below {symbols}, which may recur"
    of = {cell.axes["embedding"]: cell.config().model for cell in cells}
    buckets = Rpe(of["rpe"].rpe_num_buckets, of["rpe"].rpe_max_distance).bucket(torch.arange(99))
    last = int((buckets == buckets.max()).nonzero()[0])
    says(
        PAGE,
        f"| 4 | {len(cells)} of {steps:,} steps |",
        f"eight embeddings on four [length tasks](../length_tasks.md), trained at lengths 1 to"
        f" {longest} for {steps:,} steps, seeds {about.seeds[0]} to {about.seeds[-1]}.",
        f"its score at length {about.lengths[0]} is at least 0.8.",
        f"its score at length {about.lengths[1]} is at least half of that at length {longest}.",
        f"both numbers of runs, of {word(len(about.seeds))}. Length {about.lengths[2]} is",
        f"`length` of `fire` is {2 * longest}, the inputs of",
        f"The last bucket of `rpe` begins at distance {last}, so",
        f"a row of length {longest} by position alone: each symbol is copied over {longest + 1}",
        f"{distinct(longest):.0%} of the rows of length {longest} have no number twice, and"
        f" {distinct(about.lengths[1]):.0%} of those of length {about.lengths[1]}.",
    )
    assert of["fire"].pos_emb_options == {"length": 2 * longest}
    assert of["rpe"].rpe_max_distance == of["rpe"].rpe_num_buckets == 8 < longest + 1
    assert (len(about.axes["embedding"]), len(table)) == (8, 4)


def scores(task: str, embedding: str, seed: int) -> list[float]:
    guess = 0.5 if task == "parity" else 0.0
    return [(RIGHT[task, embedding, seed, n] - guess) / (1 - guess) for n in ABOUT.lengths]


def counts() -> dict[tuple[str, str], tuple[int, int]]:
    """Return how many runs have learnt a task, and how many generalize, by embedding and task."""
    found = {}
    for embedding in EMBEDDINGS:
        for task in TASKS:
            runs = [scores(task, embedding, seed) for seed in ABOUT.seeds]
            learnt = [run for run in runs if run[0] >= 0.8 - 1e-9]
            found[embedding, task] = (
                len(learnt), sum(run[1] >= run[0] / 2 - 1e-9 for run in learnt)
            )  # fmt: skip
    return found


def test_the_table_of_scores():
    assert len(RIGHT) == len(grid("arena_tasks").cells) * len(ABOUT.lengths)
    with (LAB / "tables" / "arena_scores.csv").open(newline="") as file:
        table = {row.pop("embedding"): row for row in csv.DictReader(file)}
    names = {name: name.replace(" ", "").strip("`") for name in table}
    assert [*names.values()] == EMBEDDINGS
    found = counts()
    for name, row in table.items():
        assert row == {t: "{} / {}".format(*found[names[name], t]) for t in TASKS}, name


def test_the_findings_on_the_tasks():
    found = counts()
    total = {t: [sum(found[e, t][n] for e in EMBEDDINGS) for n in (1, 0)] for t in TASKS}
    means = pd.read_csv(ROOT / "docs/results/arena_tasks/counts.csv")
    means = means.set_index(["task", "embedding"])
    for (task, embedding), row in means.iterrows():
        runs = pd.DataFrame([scores(task, embedding, seed) for seed in ABOUT.seeds])
        shown = [row[f"score_{length}"] for length in ABOUT.lengths]
        assert shown == pytest.approx(runs.mean().tolist(), abs=1e-4)
        assert (row.learnt, row.generalizes) == found[embedding, task]
    near = [means.score_20["copy_64", e] for e in EMBEDDINGS if found[e, "copy_64"][1] == 2]
    assert means.score_40.idxmax() == ("unique_copy", "forget_gate")
    assert means.score_40.drop("unique_copy", level="task").max() < 0.02
    assert all(found["none", task][0] == 0 and found["rotary", task][0] == 3 for task in COPIES)
    for seed in ABOUT.seeds:
        assert not any(scores(task, "rotary", seed)[1] for task in COPIES)
        assert scores("parity", "rotary", seed)[1] < -0.2
    rest = {*EMBEDDINGS} - {"none", "rotary"}
    assert {found[name, "unique_copy"][1] for name in rest} == {2, 3}
    says(
        PAGE,
        "{} of {} generalize on `unique_copy`, {} of {} on `copy_64`, {} of {} on `copy` and"
        " {} of {} on `parity`.".format(
            *(each for t in ("unique_copy", "copy_64", "copy", "parity") for each in total[t])
        ),
        f"largest mean score is {means.score_40.max():.2f} (`forget_gate` on `unique_copy`), then"
        f" {means.score_40['unique_copy', 'sink+kerple_log']:.2f} (`sink + kerple_log`) and"
        f" {means.score_40['unique_copy', 'kerple_log']:.2f} (`kerple_log`).",
        "no mean is above 0.02.",
        f"that generalize in two runs are {min(near):.2f} to {max(near):.2f}.",
    )
