"""Measure the runs of the arena (plan_arena.md), and write its tables and pictures.

    python docs/lab/arena.py configs/paper/arena.yml --out docs/results/arena --jobs 2

Each finished run is measured at the lengths of the grid. Its measures are stored in the run folder
(`arena.json`), so a run is measured once. A run that is not finished, or whose losses are not
finite, is named and left out. Rows of an earlier `runs.csv` stay, so the grid may be run in parts;
a method is tested when it has all its seeds.

`runs.csv` has a row for each run, `methods.csv` a row for each method with the plan's tests. The
pictures show the gain of each run, and the perplexity by length of each method.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from recipe import by_length, finished_cells, perplexities, with_earlier
from scipy.stats import t

from megatron import pictures
from megatron.data.samples.split import SPLITS
from megatron.engine.errors import DivergedError
from megatron.engine.job.job_or_alone import job_or_alone
from megatron.engine.open_run import open_run
from megatron.engine.open_text import open_text
from megatron.entry import assignment
from megatron.evaluation.suite import context, perplexity, recall
from megatron.evaluation.suite.measure import Subject, read_sample
from megatron.evaluation.suite.pointer import pointer
from megatron.files import write_text
from tools.experiments.claims import holm
from tools.experiments.grid import Cell

REFERENCE = "kerple_log"
MEASURES = "arena.json"
HARMED_GAIN = -0.05
"""Nats per token. A method with a lower mean gain is harmed by distant text."""
HARMED_RISE = math.log(1.05)
"""A method whose mean log perplexity rises by more up to the longest length is also harmed."""
SEEDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("grid", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for tables and pictures")
    parser.add_argument("--jobs", type=int, default=1, help="runs measured at a time")
    parser.add_argument("--set", action="append", default=[], type=assignment,
                        metavar="NAME=VALUE", help="a variable of the grid")  # fmt: skip
    given = parser.parse_args(arguments)
    cells = list(finished_cells(given.grid, dict(given.set)))
    if given.jobs == 1:
        faults = list(map(measure, cells))
    else:
        one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
        with ProcessPoolExecutor(given.jobs, get_context("spawn"), **one_thread) as pool:
            faults = list(pool.map(measure, cells))
    for cell, fault in zip(cells, faults, strict=True):
        print(f"{cell.name}: {fault or 'measured'}", file=sys.stderr)
    cells = [cell for cell, fault in zip(cells, faults, strict=True) if not fault]
    if not cells:
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    runs = with_earlier(pd.DataFrame(map(row, cells)), given.out / "runs.csv", ["method"])
    runs.to_csv(given.out / "runs.csv", index=False, float_format="%.6g")
    methods = compared(runs)
    methods.to_csv(given.out / "methods.csv", index=False, float_format="%.4g")
    print(methods.to_string(index=False))
    pictures.save(gains(runs), given.out / "gain.png")
    pictures.save(by_length(runs, "Perplexity by length"), given.out / "by_length.png")
    return 0


def measure(cell: Cell) -> str:
    """Measure a run with the suite's functions, unless its folder has the measures.

    Returns:
        Why the run cannot be measured, or an empty text.
    """
    path = cell.folder / MEASURES
    if not path.exists():
        try:
            measures = measured(cell)
        except DivergedError as error:
            return str(error)
        write_text(path, json.dumps(measures, indent=1))
    return ""


def measured(cell: Cell) -> dict[str, Any]:
    """Return the rows and the answer of each measure."""
    config = cell.config()
    with job_or_alone(config) as groups:
        run = open_run(cell.folder, config, groups)
        text, chosen = open_text(config, run.tokenizer), config.evaluation
        sample = read_sample(
            text.shards,
            text.splits[SPLITS.index(chosen.eval_split)],
            tuple(sorted(set(chosen.eval_lengths))),
            train_length=config.model.seq_length,
            tokens=chosen.eval_suite_tokens,
            eod=run.tokenizer.eod,
        )
        subject = Subject(run.model, groups, chosen.eval_batch_tokens)
        full_nT = subject.losses(sample.sequences_nT)
        twin_nT = subject.losses(sample.sequences_nT, window=sample.train_length)
        found = [
            perplexity.by_length(subject, sample, full_nT, run.tokenizer.token_bytes),
            context.windowed_twin(sample, full_nT, twin_nT),
            pointer(sample, full_nT, twin_nT),
            recall.induction(subject, sample),
            recall.copying(subject, sample),
        ]
    return {
        each.name: {"answer": each.answer, "rows": [line.flat() for line in each.rows]}
        for each in found
    }


def row(cell: Cell) -> dict[str, Any]:
    """Return the measures of a run as the plan defines them."""
    found = json.loads((cell.folder / MEASURES).read_text())
    values = {each["length"]: each["value"] for each in found["by_length"]["rows"]}
    far = found["pointer"]["rows"][0]
    return {
        "method": cell.axes["embedding"],
        "seed": cell.seed,
        **{f"perplexity_{length}": value for length, value in values.items()},
        "documents": far["documents"],
        "gain": far["taken"],
        "gain_low": far["taken_low"],
        "gain_high": far["taken_high"],
        "headroom": far["value"],
        "share": far.get("share", math.nan),  # absent if the headroom's interval contains 0
        "places": len(found["copy"]["answer"]),
        "induction": found["induction"]["answer"],
    }


def compared(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the means of each method, and the plan's tests, in the order of the gain."""
    shortest, *_, longest = perplexities(runs)
    values = runs.assign(
        level=np.log(runs[shortest]), change=np.log(runs[longest]) - np.log(runs[shortest])
    )
    columns = ["level", "change", "gain", "share", "places"]
    means = values.groupby("method", sort=False)[columns].mean()
    means.insert(0, "seeds", values.groupby("method", sort=False).size())
    means["harmed"] = (means.gain < HARMED_GAIN) | (means.change > HARMED_RISE)
    every = values[values.method.isin(means.index[means.seeds == SEEDS])]
    fair = every[~every.method.isin(means.index[means.harmed])]
    for name, chosen, column, reference in (
        ("gain_p", fair, "gain", None),
        ("gain_differs_p", fair, "gain", REFERENCE),
        ("level_differs_p", every, "level", REFERENCE),
    ):
        table = chosen.pivot(index="method", columns="seed", values=column)
        means[name] = p_values(table, reference)
    return means.sort_values("gain", ascending=False).reset_index()


def p_values(values: pd.DataFrame, reference: str | None = None) -> pd.Series:
    """Return the p value of each method after Holm's correction, with one variance for all.

    The model is "value = method + seed + error". In a difference of two methods, the seeds cancel.
    The mean of one method contains the variance of the seeds, so its degrees of freedom are
    Satterthwaite's. The result is empty without two methods, or without the reference.

    Args:
        values: The value of each method (rows) with each seed (columns).
        reference: The test is two-sided: the method's mean differs from that of this method. With
            None, it is one-sided: the mean is above 0.
    """
    methods, seeds = values.shape
    if methods < 2 or (reference and reference not in values.index):
        return pd.Series(dtype=float)
    mean = values.mean(axis=1)
    centred = values.sub(mean, axis=0)
    of_seeds = centred.mean(axis=0)
    freedom = (methods - 1) * (seeds - 1)
    error = float((centred.sub(of_seeds, axis=1) ** 2).to_numpy().sum()) / freedom
    if reference:
        scaled = (mean - mean[reference]).drop(reference) / math.sqrt(2 * error / seeds)
        found = 2 * t.sf(scaled.abs(), freedom)
    else:
        parts = float((of_seeds**2).sum()) / (seeds - 1), error * (methods - 1) / methods
        scaled = mean / math.sqrt(sum(parts) / seeds)
        squares = parts[0] ** 2 / (seeds - 1) + parts[1] ** 2 / freedom
        found = t.sf(scaled, sum(parts) ** 2 / squares)
    return pd.Series(holm(list(found)), index=scaled.index)


@pictures.in_style()
def gains(runs: pd.DataFrame) -> Any:
    """Draw the gain of each run and the mean of each method; large losses are cut off."""
    figure, (axes,) = pictures.panels("Gain from text beyond the training length")
    means = runs.groupby("method").gain.mean().sort_values()
    least = 1.5 * HARMED_GAIN
    for place, name in enumerate(means.index):
        given = runs[runs.method == name].gain.clip(lower=least)
        axes.plot(given, [place] * len(given), ls="", marker="o", ms=4, color="C0")
        axes.plot(max(means[name], least), place, ls="", marker="|", ms=14, color="C1")
    axes.axvline(0, color="grey", lw=1)
    axes.set(xlabel=f"nats per token (below {least:g}: at the edge); line: mean over seeds")
    axes.set_yticks(range(len(means)), means.index)
    return figure


if __name__ == "__main__":
    sys.exit(main())
