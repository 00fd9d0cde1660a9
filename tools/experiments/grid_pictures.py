"""Draw the results of many runs by length: one curve for each value of an axis of the grid.

An axis is a setting that differs between the runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron import pictures
from tools.experiments.results import CURVES, Frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAR = 1.5  # curves above this times the lowest end of a curve are left out of the second plot


def by_length(results: Frame, rows: str, metric: str, title: str) -> Figure:
    """Plot a metric by length: one curve for each value of the axis `rows`.

    A curve shows the means over seeds, with a band of one standard deviation above and below. More
    than eight curves are distributed over several plots, the lowest curves first. If some curves
    rise far above the others, a second plot shows only the others.

    Args:
        results: The results of all runs.
        rows: The name of the axis.
        metric: The name of the metric.
        title: The title of the figure.
    """
    mean = results.pivot_table("value", rows, "length", sort=False).sort_index(axis=1)
    std = results.pivot_table("value", rows, "length", "std", sort=False).reindex_like(mean)
    order, end = list(mean.index), mean.ffill(axis=1).iloc[:, -1].sort_values(kind="stable")
    groups = pictures.divided(list(end.index))
    steep = mean.min(axis=None) > 0 and mean.max(axis=None) > pictures.STEEP * end.min()
    near = [row for row in end.index if mean.loc[row].max() < FAR * end.min()]
    if zoomed := len(groups) == 1 and steep and 1 < len(near) < len(order):
        groups.append(near)
    many = len(order) > pictures.MOST_LINES
    curves = {}
    for row in order:
        values = mean.loc[row].dropna()
        error = std.loc[row, values.index].fillna(0)
        band = np.maximum(values - error, values / 10), values + error
        number = None if many else order.index(row)
        curves[row] = pictures.Curve(str(row), values.index, values, band, number)
    xlabel = "tokens of context" if metric in CURVES.values() else "sequence length (tokens)"
    found = [[curves[row] for row in group] for group in groups]
    figure = pictures.by_length(title, found, xlabel, metric)
    if zoomed:
        figure.axes[-1].set_title(
            "The same, without the curves that rise far", loc="left", fontsize="medium"
        )
    return figure
