"""Read what a figure of matplotlib shows: names, bands and ticks."""

from __future__ import annotations

from typing import Any


def names_of(axes: Any) -> list[str]:
    """Return the names beside the curves, from top to bottom."""
    beside = [text for text in axes.texts if text.get_position()[0] > 1]
    return [text.get_text() for text in sorted(beside, key=lambda each: -each.get_position()[1])]


def curves_of(axes: Any) -> list[Any]:
    """Return the curves that have a name."""
    return [line for line in axes.lines if not line.get_label().startswith("_")]


def band_of(axes: Any, number: int = 0) -> set[tuple[float, float]]:
    """Return the corners (x, y) of a band."""
    [path] = axes.collections[number].get_paths()
    return {(float(x), float(y)) for x, y in path.vertices}


def ticks_of(axis: Any) -> list[str]:
    """Return the texts of an axis' ticks that are inside of the plot."""
    axis.figure.draw_without_rendering()
    low, high = sorted(axis.get_view_interval())
    shown = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
    return [label.get_text() for place, label in shown if low <= place <= high]
