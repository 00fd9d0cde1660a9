"""Draw the results of many runs by length: a curve for each value of an axis of the grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from megatron import pictures
from tools.experiments.results import CURVES, Frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAR = 1.5  # curves above this times the lowest end of a curve are left out of the second plot


@pictures.in_style()
def by_length(results: Frame, rows: str, metric: str, title: str) -> Figure:
    """Plot the metric by length: the means over seeds, with a standard deviation on both sides.

    Each value of the axis `rows` is a curve. More than eight share several plots, the lowest
    curves first. If some curves rise far above others, a second plot shows those others alone.
    """
    mean = results.pivot_table("value", rows, "length", sort=False)
    std = results.pivot_table("value", rows, "length", "std", sort=False).reindex_like(mean)
    order, end = list(mean.index), mean.ffill(axis=1).iloc[:, -1].sort_values(kind="stable")
    groups = pictures.divided(list(end.index))
    steep = mean.min(axis=None) > 0 and mean.max(axis=None) > pictures.STEEP * end.min()
    near = [row for row in end.index if mean.loc[row].max() < FAR * end.min()]
    if zoomed := len(groups) == 1 and steep and 1 < len(near) < len(order):
        groups.append(near)
    figure, plots = pictures.panels(title, len(groups), 3.4)
    for axes, group in zip(plots, groups, strict=True):
        for place, row in enumerate(group):
            values = mean.loc[row].dropna()
            error = std.loc[row, values.index].fillna(0)
            band = np.maximum(values - error, values / 10), values + error
            number = place if len(order) > pictures.MOST_LINES else order.index(row)
            pictures.curve(axes, values.index, values, str(row), band, number)
        pictures.value_axis(axes, pd.concat([mean, mean + std.fillna(0)]).loc[group])
        label = "tokens of context" if metric in CURVES.values() else "sequence length (tokens)"
        pictures.length_axis(axes, list(mean.columns), label)
        axes.set_ylabel(metric)
    if zoomed:
        plots[-1].set_title("The same, without the curves that rise far")
    pictures.label_lines(plots)
    return figure
