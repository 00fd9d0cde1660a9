"""Draw pictures in one style, and write each picture as a PNG file and as an SVG file.

The style is `pictures.mplstyle`. Functions that draw have the decorator `@in_style()`. Numbers on
axes are plain: 1,000, never 10^3. The name of a curve is beside the curve's right end, not in a
legend. A plot has at most MOST_LINES curves. `divided` distributes more curves over several plots.

matplotlib is imported inside the functions, because the import takes half a second. The plots use
`Figure` without pyplot, because `Figure` needs no display and leaves no global state.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = Path(__file__).with_suffix(".mplstyle")
MOST_LINES = 8  # in one plot; the style has as many colours
STEEP = 3.0  # positive values this many times apart get a logarithmic axis
PLAIN = "{x:,.12g}"  # the format of numbers on axes
_DARK = "@media (prefers-color-scheme: dark) {svg {filter: invert(.9) hue-rotate(180deg)}}"


@dataclass(frozen=True)
class Curve:
    """A curve in a plot whose x axis is a length, such as the sequence length.

    Attributes:
        name: The text beside the right end of the curve.
        x, y: The coordinates of the points, by increasing x. Each point gets a marker.
        band: The lower and the upper ends of the intervals around the points, or None.
        number: The index of the curve's colour and marker in the style. If it is None, the index of
            the curve in its plot is used.
        style: Settings of matplotlib that override the style, such as a line style.
    """

    name: str
    x: Any
    y: Any
    band: tuple[Any, Any] | None = None
    number: int | None = None
    style: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def in_style() -> Iterator[None]:
    """Draw in the project's style. The settings in the user's own matplotlibrc have no effect.

    The style applies to the body of the `with` block or of the decorated function.
    """
    import matplotlib

    with matplotlib.rc_context(fname=STYLE):
        yield


def panels(title: str, count: int = 1, height: float = 3.8) -> tuple[Figure, list[Axes]]:
    """Return a new figure with a title and `count` plots, and a list of these plots.

    Up to three plots are in one column. More plots are in two columns.

    Args:
        title: The title, for example the model, the data and the date. It may have several lines.
        count: The number of plots.
        height: The height of a plot, in inches.
    """
    from matplotlib.figure import Figure

    columns = 1 if count <= 3 else 2
    rows = math.ceil(count / columns)
    width = 3 + 4 * columns
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    lines = [textwrap.fill(line, 12 * width) for line in title.splitlines()]
    figure.suptitle("\n".join(lines), x=0.01, ha="left")
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


@in_style()
def by_length(
    title: str,
    groups: Sequence[Sequence[Curve]],
    xlabel: str,
    ylabel: str,
    trained: int = 0,
    fit: bool = True,
) -> Figure:
    """Draw curves by length: one plot for each group of curves.

    The x axis is the length, on a logarithmic scale with base 2.

    Args:
        title: The title of the figure.
        groups: The groups of curves.
        xlabel: The label of the x axis of every plot.
        ylabel: The label of the y axis of every plot.
        trained: The training length, which the plots mark with a vertical line. For 0, there is no
            line.
        fit: Whether the range of the y axis is fitted to the curves. If the values of the curves
            are far apart, the fitted axis is logarithmic.
    """
    import matplotlib

    figure, plots = panels(title, len(groups), 3.8 if len(groups) == 1 else 3.4)
    cycle = list(matplotlib.rcParams["axes.prop_cycle"])
    for axes, group in zip(plots, groups, strict=True):
        axes.yaxis.set_major_formatter(PLAIN)
        for place, curve in enumerate(group):
            look = cycle[(place if curve.number is None else curve.number) % len(cycle)]
            axes.plot(curve.x, curve.y, label=curve.name, **look | curve.style)
            if curve.band is not None:
                axes.fill_between(curve.x, *curve.band, color=look["color"], alpha=0.18)
        lengths = sorted({int(x) for curve in group for x in curve.x})
        shown = lengths[:: math.ceil(len(lengths) / 9)]
        axes.set_xscale("log", base=2)
        axes.set_xticks(shown, [f"{length:,}" for length in shown])
        axes.minorticks_off()
        axes.set(xlabel=xlabel, ylabel=ylabel)
        if trained:
            mark_training_length(axes, trained)
        if fit:
            _fit(axes, np.concatenate([each for c in group for each in (c.y, *(c.band or ()))]))
    label_lines(plots)
    return figure


def divided(curves: Sequence[Any]) -> list[list[Any]]:
    """Divide curves into as few groups as possible, each with at most MOST_LINES curves.

    The groups are about equally large.
    """
    size = math.ceil(len(curves) / math.ceil(len(curves) / MOST_LINES))
    return [list(curves[start : start + size]) for start in range(0, len(curves), size)]


def plain_ticks(axis: Any, low: float, high: float) -> None:
    """Give a logarithmic axis ticks with plain numbers, such as 20, 50 and 1,000.

    Args:
        axis: The x axis or the y axis of a plot.
        low: The smallest value on the axis.
        high: The largest value on the axis.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    decades = math.log10(high / low)
    subs = (1.0,) if decades > 3 else (1.0, 2.0, 5.0)
    axis.set_major_locator(
        LogLocator(subs=subs) if decades > 1 else MaxNLocator(6, steps=[1, 2, 5, 10])
    )
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(PLAIN)


def _fit(axes: Axes, values: Any) -> None:
    """Fit the range of the y axis to positive values.

    If the values are far apart, the axis becomes logarithmic. The range is larger than needed, so
    that noise on a flat curve does not fill the plot.
    """
    found = np.asarray(values, dtype=np.float64)
    found = found[np.isfinite(found)]
    if found.size and found.min() > 0:
        low, high = float(found.min()), float(found.max())
        if high > STEEP * low:
            axes.set_yscale("log")
            plain_ticks(axes.yaxis, low, high)
        axes.set_ylim(low * 0.85, high * 1.15)


def mark_training_length(axes: Axes, length: int) -> None:
    axes.axvline(length, color="0.4", linestyle="--", linewidth=1)
    axes.annotate(
        f"trained at {length:,}", (length, 0.98), xycoords=axes.get_xaxis_transform(),
        xytext=(-3, 0), textcoords="offset points", rotation=90, ha="right", va="top",
        color="0.4", fontsize="small", zorder=1,
    )  # fmt: skip


def label_lines(plots: Sequence[Axes], width: int = 20) -> None:
    """Write the name of each curve beside its right end, in all plots of a figure.

    Call this function last, when the plots have their final ranges. Names that would overlap are
    moved apart, by as little as possible. The name is at the height of the curve's last finite
    point. If this point is outside of the plot, the name is left out.

    Args:
        plots: The plots of one figure.
        width: The number of characters in a line of a name. Longer names continue in the next line.
    """
    figure: Any = plots[0].get_figure(root=True)
    figure.draw_without_rendering()  # finds the size of the plots
    for axes in plots:
        to_axes = axes.transData + axes.transAxes.inverted()
        named = []
        for line in axes.lines:
            points, name = to_axes.transform(np.asarray(line.get_xydata())), str(line.get_label())
            points = points[np.isfinite(points).all(axis=1)]
            if name.startswith("_") or not len(points):
                continue
            x, y = points[-1]
            if -0.01 <= y <= 1.01:
                named.append((y, x, line, textwrap.fill(name, width, break_long_words=False)))
        named.sort(key=lambda each: each[0])
        row = 12.5 * figure.dpi / 72 / axes.get_window_extent().height
        _name(axes, named, row)


def _name(axes: Axes, named: Sequence[tuple[float, float, Any, str]], row: float) -> None:
    """Write the names of curves at the right of a plot, with a line from each name to its curve.

    Args:
        axes: The plot.
        named: For each curve: y and x of its right end, the curve, and its name. The first curve is
            the lowest. Coordinates are fractions of the plot's height and width.
        row: The height of a line of text, as a fraction of the plot's height.
    """
    from scipy.optimize import isotonic_regression

    if not named:
        return
    heights = row * np.array([text.count("\n") + 1 for *_, text in named])
    steps = np.cumsum(heights) - (heights + heights[0]) / 2
    free = isotonic_regression([y for y, *_ in named] - steps).x
    places = np.clip(free, 0.0, max(0.0, 1.0 - steps[-1])) + steps
    arrow = {"arrowstyle": "-", "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5), "linewidth": 0.9}
    for place, (y, x, line, text) in zip(places, named, strict=True):
        axes.annotate(
            text, (x, y), (1.04, place), xycoords="axes fraction", textcoords="axes fraction",
            va="center", fontsize="small", arrowprops=arrow | {"color": line.get_color()},
        )  # fmt: skip


def save(figure: Figure, path: Path) -> None:
    """Save the figure as the PNG file `path`, and as an SVG file of the same name beside it.

    Afterwards, the figure has no layout engine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, content(figure, "png", {"Software": None}))
    figure.set_layout_engine("none")  # the SVG file gets the layout of the PNG file
    write_bytes(path.with_suffix(".svg"), svg(figure))


def svg(figure: Figure) -> bytes:
    """Return the figure as the content of an SVG file. Equal figures give the same bytes.

    On screens with a dark colour scheme, the picture has dark colours.
    """
    drawn = content(figure, "svg", {"Date": None, "Creator": None})
    return drawn.replace(b"<defs>", f"<style>{_DARK}</style>\n <defs>".encode(), 1)


@in_style()
def content(figure: Figure, form: str, metadata: dict[str, None]) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=form, metadata=metadata)
    return out.getvalue()
