"""Measure the runs of the arena (plan_arena.md), and write its tables and pictures.

    python docs/lab/arena.py configs/paper/arena.yml --out docs/results/arena --jobs 2

Each finished run is measured at the lengths of the grid. Its measures are stored in the run folder
(`arena.json`), so a run is measured once. A run that is not finished, or whose losses are not
finite, is named and left out. Rows of an earlier `runs.csv` stay, so the grid may be run in parts.

`runs.csv` has a row for each run. `methods.csv` has a row for each method with its label, in the
order of `least`, the smaller of the two gains. With `--tests`, it has the plan's tests, and
`missing.csv` says which runs have no row and why: use it when all runs have ended. Each picture
answers one question: does distant text help (gain), how much of what the text offers is taken
(share), how well does the model do at the training length and beyond (level, by_length), from where
does it recall (recall).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from arena_pictures import draw
from recipe import by_length, finished_cells, perplexities, with_earlier
from scipy.stats import ttest_1samp

from megatron import pictures
from megatron.data.samples.split import SPLITS
from megatron.engine.errors import DivergedError
from megatron.engine.job.job_or_alone import job_or_alone
from megatron.engine.open_run import open_run
from megatron.engine.open_text import open_text
from megatron.entry import assignment
from megatron.evaluation.suite import context, perplexity, recall
from megatron.evaluation.suite.intervals import FEWEST
from megatron.evaluation.suite.measure import Subject, read_sample
from megatron.evaluation.suite.pointer import pointer
from megatron.files import write_text
from tools.experiments.claims import holm
from tools.experiments.grid import Cell, read_grid

REFERENCE = "kerple_log"
MEASURES = "arena.json"
SEEDS = 3
EXACT_TOKENS = 1_048_576
"""The number of tokens that are read for the gain over exactly W tokens (`exact`)."""
FAMILIES = Path(__file__).parent / "tables" / "arena_families.csv"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("grid", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for tables and pictures")
    parser.add_argument("--jobs", type=int, default=1, help="runs measured at a time")
    parser.add_argument("--tests", action="store_true", help="all runs have ended: make the tests")
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
    why = {cell.name: fault for cell, fault in zip(cells, faults, strict=True)}
    for name, fault in why.items():
        print(f"{name}: {fault or 'measured'}", file=sys.stderr)
    cells = [cell for cell in cells if not why[cell.name]]
    if not cells:
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    runs = with_earlier(pd.DataFrame(map(row, cells)), given.out / "runs.csv", ["method"])
    runs.to_csv(given.out / "runs.csv", index=False, float_format="%.6g")
    runs = pd.read_csv(given.out / "runs.csv")  # so all else follows from the file, to its digits
    if given.tests:
        missing = [
            (cell.name, why.get(cell.name, "is not finished"))
            for cell in read_grid(given.grid, dict(given.set)).cells
            if not ((runs.method == cell.axes["embedding"]) & (runs.seed == cell.seed)).any()
        ]
        table = pd.DataFrame(missing, columns=["cell", "reason"])
        table.to_csv(given.out / "missing.csv", index=False)
    methods = compared(runs, given.tests)
    methods.to_csv(given.out / "methods.csv", index=False, float_format="%.6g")
    print(methods.to_string(index=False))
    draw(with_derived(runs), given.out)
    pictures.save(by_length(runs, "Perplexity by length"), given.out / "by_length.png")
    return 0


def measure(cell: Cell) -> str:
    """Measure a run with the suite's functions, unless its folder has the measures.

    Returns:
        Why the run cannot be measured, or an empty text.
    """
    path, given = cell.folder / MEASURES, settings(cell)
    if path.exists():
        same = json.loads(path.read_text()).get("settings") == given
        return "" if same else f"{path} has other settings; delete it to measure the run again"
    try:
        measures = measured(cell)
    except DivergedError as error:
        return str(error)
    write_text(path, json.dumps({"settings": given, **measures}, indent=1))
    return ""


def settings(cell: Cell) -> dict[str, Any]:
    """Return what the measures of a run depend on, beside the run itself, as JSON has it."""
    config = cell.config()
    chosen = {
        "data_path": config.data.data_path,
        "split": config.data.split,
        "eval_split": config.evaluation.eval_split,
        "eval_lengths": config.evaluation.eval_lengths,
        "eval_suite_tokens": config.evaluation.eval_suite_tokens,
        "exact_tokens": EXACT_TOKENS,
        "steps": config.training.train_iters,
    }
    return json.loads(json.dumps(chosen))


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
        more = replace(sample, tokens=EXACT_TOKENS)
        full_nT = subject.losses(sample.sequences_nT)
        twin_nT = subject.losses(sample.sequences_nT, window=sample.train_length)
        found = [
            perplexity.by_length(subject, sample, full_nT, run.tokenizer.token_bytes),
            context.windowed_twin(sample, full_nT, twin_nT),
            context.exact_context(subject, more, full_nT),
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
    far, exact = found["pointer"]["rows"][0], found["exact_context"]["rows"][0]
    return {
        "method": cell.axes["embedding"],
        "seed": cell.seed,
        **{f"perplexity_{length}": value for length, value in values.items()},
        "documents": far["documents"],
        "gain": far["taken"],
        "gain_low": far["taken_low"],
        "gain_high": far["taken_high"],
        "exact": exact["value"],
        "exact_low": exact["low"],
        "exact_high": exact["high"],
        "headroom": far["value"],
        "places": len(found["copy"]["answer"]) if far["documents"] >= FEWEST else math.nan,
        "induction": found["induction"]["answer"],
    }


def compared(runs: pd.DataFrame, tests: bool = False) -> pd.DataFrame:
    """Return the means of each method and its label, in the order of the smaller gain.

    Args:
        tests: Also return the p values of the plan's tests, for methods with all their seeds.
    """
    values = with_derived(runs)
    groups = values.groupby("method", sort=False)
    means = groups[["level", "change", "gain", "exact", "least", "share", "places"]].mean()
    means.insert(0, "seeds", groups.size())
    means.insert(6, "least_sd", groups.least.std())
    means["label"] = groups.label.first()
    searched = pd.read_csv(FAMILIES)["searched with"].str.replace(" ", "")
    means["rate"] = np.where(means.index.isin(searched), "searched", "of its family")
    if tests:
        tested = means[means.seeds == SEEDS]
        gain, level = (
            values.pivot(index="method", columns="seed", values=each).loc[tested.index]
            for each in ("least", "level")
        )
        above = ttest_1samp(gain, 0, axis=1, alternative="greater").pvalue
        above = pd.Series(np.where(tested.label == "gains", above, 1.0), gain.index)
        means["gain_p"] = corrected(above)
        means["gain_differs_p"] = corrected(paired(gain))
        means["level_differs_p"] = corrected(paired(level[tested.rate == "searched"]))
    return means.sort_values("least", ascending=False).reset_index()


def with_derived(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs with what follows from their measures.

    The columns are level, change, least (the smaller gain), the label of the method, and share. A
    run has a share if the method is labelled "gains".
    """
    shortest, *_, longest = perplexities(runs)
    headroom = runs[runs.method == REFERENCE].set_index("seed").headroom
    ends = runs[["method", "gain_low", "gain_high", "exact_low", "exact_high"]]
    labels = {name: label(method) for name, method in ends.groupby("method")}
    runs = runs.assign(
        level=np.log(runs[shortest]),
        change=np.log(runs[longest]) - np.log(runs[shortest]),
        least=runs[["gain", "exact"]].min(axis=1),
        label=runs.method.map(labels),
    )
    share = runs.gain / runs.seed.map(headroom)
    return runs.assign(share=share.where(runs.label == "gains"))


def label(method: pd.DataFrame) -> str:
    """Return what distant text does to a method, by the intervals of both gains of each seed.

    Without all seeds, the label is empty.
    """
    if len(method) < SEEDS:
        return ""
    if (method[["gain_low", "exact_low"]] > 0).all(axis=None):
        return "gains"
    return "loses" if (method[["gain_high", "exact_high"]] < 0).all(axis=None) else "unclear"


def paired(values: pd.DataFrame) -> pd.Series:
    """Return the p value of each method's difference from the reference, paired by seed.

    Args:
        values: The value of each method (rows) with each seed (columns). Without the reference, the
            result is empty.
    """
    if REFERENCE not in values.index:
        return pd.Series(dtype=float)
    gaps = values.sub(values.loc[REFERENCE]).drop(REFERENCE)
    return pd.Series(ttest_1samp(gaps, 0, axis=1).pvalue, gaps.index)


def corrected(p_values: pd.Series) -> pd.Series:
    return pd.Series(holm(list(p_values)), index=p_values.index, dtype=float)


if __name__ == "__main__":
    sys.exit(main())
