"""Draw the pictures and reports of the pages again, from the tables beside them.

    python docs/lab/pictures.py

Nothing is measured. `theta_kerple_log.csv` has the kernels at the end of the quickstart of
2026-11-24 (AMD EPYC, 2 cores, commit acfee1a9), whose perplexities are those of
`extrapolation_kerple_log.csv` to 1e-6. The folders of the other runs are not in the repository, so
the reports have no pictures of their kernels.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks import attention_cpu, data_prep, plan_memory, samples, train_step
from benchmarks.host import launch_time, linear_time
from benchmarks.report import picture
from megatron import pictures
from megatron.evaluation.length_report import extrapolation_figure, kernels_figure
from megatron.evaluation.perplexity_statistics import LengthResult
from tools.experiments import grid_report
from tools.experiments.claims import Verdict
from tools.experiments.grid import read_grid

ROOT = Path(__file__).parents[2]
MODEL = "4 layers of width 128"
GRIDS = {
    "code": ("stand_in", "the Python standard library", "2026-11-22, commit 3d891c6"),
    "prose": ("stand_in", "State of the Union addresses", "2026-11-23, commit dc05022"),
    "latex": ("stand_in", "LaTeX of the Stacks project", "2026-11-23, commit dc05022"),
    "terms": ("stand_in_terms", "the Python standard library", "2026-11-23, commit 91af645"),
}


def quickstart() -> None:
    """Draw the perplexity by length of each embedding, and the kernels of `kerple_log`."""
    folder = ROOT / "docs" / "quickstart"

    def known(row: dict) -> dict:
        """Leave out the columns that say with what a row was measured."""
        return {each.name: row[each.name] for each in fields(LengthResult)}

    def title(what: str, name: str, day: str) -> str:
        return f"{what} of {name}, {MODEL}, step 1,400\npython-stdlib, trained at 128 tokens, {day}"

    for path in sorted(folder.glob("extrapolation_*.csv")):
        name = path.stem.removeprefix("extrapolation_")
        rows = [LengthResult(**known(row)) for row in pd.read_csv(path).to_dict("records")]
        found = folder / f"context_baseline_{name}.csv"
        table = pd.read_csv(found) if found.exists() else pd.DataFrame()
        short = table.rename(columns={"context": "length"}).to_dict("records")
        baselines = {row["baseline"]: LengthResult(**known(row)) for row in short}
        head = title(
            "Perplexity by length",
            name.replace("log_", "log + ").replace("rotary_", "rotary + "),
            "2026-11-22",
        )
        pictures.save(extrapolation_figure(rows, 128, baselines, head), path.with_suffix(".png"))
    theta = pd.read_csv(folder / "theta_kerple_log.csv")
    distances = np.unique(np.geomspace(1, 2048, 400).round())
    p, a = (theta[name].to_numpy()[:, None] for name in ("bias_p", "bias_a"))
    head = title("The kernel of each head", "kerple_log", "2026-11-24")
    kernels = {"bias b(d)": -p * np.log1p(a * distances)}
    figure = kernels_figure(kernels, distances, 128, head)
    pictures.save(figure, folder / "kernels_kerple_log.png")


def grids() -> None:
    """Draw the perplexity by length of each grid, and write the reports."""
    for name, (file, text, when) in GRIDS.items():
        folder, grid_file = ROOT / "docs" / "results" / name, f"configs/paper/{file}.yml"
        other = name in ("prose", "latex")
        sets = f" --set corpus={name} --set data=data/{name}_text_document" if other else ""
        grid = read_grid(ROOT / grid_file, {})
        found, moved = (pd.read_csv(folder / each) for each in ("results.csv", "theta.csv"))
        about = f"{MODEL}, {text}, trained at 128 tokens, {when}"
        parts = grid_report.sections(found, moved, grid.rows, "perplexity", grid, False, about)
        pictures.save(next(iter(parts[0].pictures.values())), folder / "by_length.png")
        if not (folder / "verdicts.csv").exists():
            continue
        verdicts = [
            Verdict(**row) for row in pd.read_csv(folder / "verdicts.csv").to_dict("records")
        ]
        cells = pd.read_csv(folder / "cells.csv")
        head = {
            "title": f"{grid.about.title}: {text}",
            "question": grid.about.question,
            "methods": f"{len(cells)} models with {MODEL} (1.1M parameters) were trained for 700 "
            f"steps of 16 sequences of 128 tokens on {text}, with 3 or 5 seeds. They are measured "
            "on the test split; a claim is tested over the seeds by paired t tests at a level of "
            "0.05, after Holm's correction for all claims.",
            "models": about,
            "rebuild": f"python tools/sweep.py {grid_file}{sets}\n"
            f"python tools/table.py {grid_file}{sets} --out docs/results/{name}",
            "origin": f"The runs: {when}, 2 cores of an AMD EPYC, code "
            f"{cells['megatron'].iloc[0]}, torch {cells['torch'].iloc[0]}, "
            f"Python {cells['python'].iloc[0]}.",
        }
        (folder / "report.html").write_text(grid_report.page("html", head, parts, verdicts, []))


def benchmarks() -> None:
    """Draw the results of the benchmarks."""
    folder = ROOT / "benchmarks" / "results"
    drawn = {
        "data_prep": ("Data preparation, 64 MB of text", data_prep.draw, "2026-11-22"),
        "data_prep_640": ("Data preparation, 640 MB of text", data_prep.draw, "2026-11-22"),
        "launch_time": (
            "The host's time for a call of fused attention",
            launch_time.draw,
            "2026-11-23",
        ),
        "linear_time": ("Products in fp32 on a CPU", linear_time.draw, "2026-11-23"),
        "samples": ("Sample index and reads", samples.draw, "2026-11-22"),
    }
    for name, (title, draw, day) in drawn.items():
        rows = pd.read_csv(folder / f"{name}.csv").to_dict("records")
        title += f"\n{day}, AMD EPYC, 2 cores, Python 3.11.7"
        picture(
            folder / f"{name}.png", title, lambda figure, draw=draw, rows=rows: draw(figure, rows)
        )
    for name, module, height, day in (
        ("attention_cpu/attention", attention_cpu, 6.0, "2026-11-21"),
        ("attention_cpu_documents/attention", attention_cpu, 6.0, "2026-11-22"),
        ("train_step/train_step", train_step, 5.0, ""),
    ):
        found = json.loads((folder / f"{name}.json").read_text())
        found["setting"].setdefault("date", day)  # the first reports have none
        path = folder / f"{name}.png"
        draw = partial(module.draw, found)
        picture(path, module.title(found), draw, height)
    found = json.loads((folder / "plan_memory.json").read_text())
    path = folder / "plan_memory.png"
    picture(
        path, plan_memory.title(found), lambda figure: plan_memory.draw(found["rows"], figure), 6.0
    )


if __name__ == "__main__":
    quickstart()
    grids()
    benchmarks()
