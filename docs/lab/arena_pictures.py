"""Draw the pictures of the arena (plan_arena.md): one for each question.

arena.py and arena_texts.py call these functions with their tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron import pictures

QUESTIONS = {
    "gain": ("Does text beyond the training length W help?",
             {"gain": "gain over the windowed twin (nats)",
              "exact": "gain over exactly W tokens (nats)"}),
    "share": ("How much of what the text offers is taken?",
              {"share": "gain / gain of the exact-match pointer"}),
    "level": ("How good is the model, and does its perplexity rise with the length?",
              {"level": "log perplexity at W tokens", "change": "its change to the longest text"}),
    "recall": ("From where does the model recall?",
               {"places": "places, of nine, that it copies from",
                "induction": "longest distance of induction (tokens)"}),
}  # fmt: skip
"""Maps a picture to its question, and to its measures with the labels of their axes."""
SHOWN = {"gain": (-0.1, 0.1), "exact": (-0.1, 0.1), "share": (-0.5, 1.0), "change": (-0.5, 0.5)}
"""The range of each measure that has a sign. Values outside are drawn as triangles at its edge."""


def draw(values: pd.DataFrame, folder: Path) -> None:
    """Draw the picture of each question into the folder.

    Args:
        values: A row for each run, with its method and its measures.
        folder: The folder of the pictures.
    """
    for name, (question, columns) in QUESTIONS.items():
        pictures.save(dots(values, question, columns), folder / f"{name}.png")


@pictures.in_style()
def dots(values: pd.DataFrame, title: str, columns: Mapping[str, str]) -> Any:
    """Draw measures of each run, by the mean of the smaller gain of its method.

    A run is a dot, with its interval if the measure has one. A line marks the mean of the method.
    Methods without a value are left out.

    Args:
        values: A row for each run.
        title: The title of the figure.
        columns: Maps each measure to the label of its axis. Each measure has a plot of its own.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    values = values.dropna(subset=list(columns), how="all")  # some methods have no share
    names = list(values.groupby("method").least.mean().sort_values().index)
    figure = Figure(figsize=(4 + 3 * len(columns), 1.2 + 0.24 * len(names)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    plots = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axes, (column, text) in zip(plots, columns.items(), strict=True):
        for place, name in enumerate(names):
            _method(axes, values[values.method == name], column, place)
        if column in SHOWN:
            axes.axvline(0, color="grey", lw=1)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set(xlabel=text, ylim=(-0.7, len(names) - 0.3))
    plots[0].set_yticks(range(len(names)), names)
    return figure


def _method(axes: Any, runs: pd.DataFrame, column: str, place: int) -> None:
    """Draw a measure of the runs of a method around the height `place`."""
    least, most = SHOWN.get(column, (-np.inf, np.inf))
    found, mean = runs[column], runs[column].mean()
    heights = place + np.linspace(0.2, -0.2, len(runs))
    if f"{column}_low" in runs:
        ends = (runs[f"{column}_{end}"].clip(least, most) for end in ("low", "high"))
        axes.hlines(heights, *ends, color="C0", lw=1)
    for beyond, marker in ((found < least, "<"), (found > most, ">")):
        axes.plot(0 * found[beyond] + (least if marker == "<" else most), heights[beyond],
                  ls="", marker=marker, ms=5, color="C0")  # fmt: skip
    inside = found.between(least, most)
    axes.plot(found[inside], heights[inside], ls="", marker="o", ms=3.5, color="C0")
    if least <= mean <= most:
        axes.plot(mean, place, ls="", marker="|", ms=13, color="C1")


@pictures.in_style()
def on_texts(gains: pd.DataFrame) -> Any:
    """Draw the smaller gain of each method on each text, by the gain on the first text.

    Each text has a plot with a range of its own, because gains differ in size from text to text.

    Args:
        gains: A row for each method, and a column for each text. Methods without a gain on each
            text are left out. A loss beyond the range is drawn as a triangle at its edge.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    gains = gains.dropna().sort_values(gains.columns[0])
    width, places = 4 + 2.5 * len(gains.columns), np.arange(len(gains))
    figure = Figure(figsize=(width, 1.2 + 0.24 * len(gains)), layout="constrained")
    figure.suptitle("Do methods that gain on code gain on other text?", x=0.01, ha="left")
    plots = figure.subplots(1, len(gains.columns), sharey=True, squeeze=False)[0]
    for axes, (text, values) in zip(plots, gains.items(), strict=True):
        least = -1.2 * values.max() if values.max() > 0 else values.min()
        beyond = values < least
        axes.axvline(0, color="grey", lw=1)
        axes.plot(values[~beyond], places[~beyond], ls="", marker="o", ms=4, color="C0")
        axes.plot(0 * values[beyond] + least, places[beyond], ls="", marker="<", ms=5, color="C0")
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set(xlabel=f"smaller gain on {text} (nats)", ylim=(-0.7, len(gains) - 0.3))
    plots[0].set_yticks(places, gains.index)
    return figure
