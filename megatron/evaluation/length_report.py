"""Write the results of an evaluation by length: a table, two CSV files, and two plots.

matplotlib is imported inside the functions, because the import takes half a second. The plots use
`Figure` without pyplot, because `Figure` needs no display and leaves no global state.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.evaluation.perplexity_statistics import LengthResult
from megatron.files import replace_table, write_bytes
from megatron.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Baselines = Mapping[str, LengthResult]
"""Maps descriptions to results of the same model with a short context."""


def write_extrapolation(
    rows: Sequence[LengthResult], run_dir: Path, train_length: int, baselines: Baselines,
    title: str, about: Mapping[str, Any],
) -> str:  # fmt: skip
    """Write `extrapolation.csv` and `extrapolation.png` into `run_dir` and return the table.

    The CSV files of an earlier evaluation are kept with `.previous` added to their names.

    Args:
        rows: The result of each length, in any order.
        train_length: The sequence length in training, in tokens; the plot marks it.
        baselines: Maps names to results of the model with a short context. The table, the plot and
            `context_baseline.csv` show these results.
        title: The title of the table and the plot.
        about: Columns with one value each (`measured_with`).

    Raises:
        ValueError: There are no rows, or a length occurs twice.
    """
    import pandas as pd

    rows = sorted(rows, key=lambda row: row.length)
    lengths = [row.length for row in rows]
    if not rows or len(set(lengths)) != len(lengths):
        raise ValueError(f"each length must have one result; the lengths are {lengths}")
    run_dir.mkdir(parents=True, exist_ok=True)
    run = RunFolder(run_dir)
    replace_table(run.extrapolation, csv_of(pd.DataFrame(rows).assign(**about)))
    shorter = pd.DataFrame(list(baselines.values()), list(baselines)).rename_axis("baseline")
    named = shorter.rename(columns={"length": "context"}).reset_index()
    replace_table(run.baselines, csv_of(named.assign(**about)) if baselines else None)
    figure = extrapolation_figure(rows, train_length, baselines, title)
    write_bytes(run.extrapolation.with_suffix(".png"), figure_png(figure))
    return _table(rows, train_length, baselines, title)


def write_kernels(
    bias_by_head: Any | None, distances: Any, weights: Any | None, train_length: int, path: Path
) -> None:
    """Plot the distance kernel of each head h: its bias b_h(d) and its weight w_h(d).

    The distances d between query and key are on a log axis, so d = 0 is left out.

    Args:
        bias_by_head: [H, n], the biases that H heads add to the attention scores at n distances;
            None if there are none.
        distances: [n], the distances in tokens.
        weights: [H, n], the factors that multiply the attention scores; None if there are none.
        train_length: The sequence length in training, in tokens; the plot marks it.
        path: The PNG file to write.

    Raises:
        ValueError: The shapes do not fit, or there is neither a bias nor a weight.
    """
    distance_n = np.asarray(distances, dtype=np.float64)
    panels = [
        (label, np.asarray(values, dtype=np.float64))
        for label, values in (("bias $b_h(d)$", bias_by_head), ("weight $w_h(d)$", weights))
        if values is not None
    ]
    if not panels:
        raise ValueError("neither a bias nor a weight: there is no kernel to draw")
    for label, values in panels:
        if values.ndim != 2 or values.shape[1:] != distance_n.shape:
            raise ValueError(
                f"{label}: shape {values.shape} does not fit {distance_n.shape} distances"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, figure_png(kernels_figure(panels, distance_n, train_length)))


def csv_of(table: Any) -> bytes:
    """Return `table` as the content of a CSV file.

    Args:
        table: A table of pandas, or a list of rows that are dicts or dataclasses.
    """
    import pandas as pd

    return pd.DataFrame(table).to_csv(index=False, na_rep="nan", lineterminator="\n").encode()


def _table(
    rows: Sequence[LengthResult], train_length: int, baselines: Baselines, title: str
) -> str:
    import pandas as pd

    cells = [("length", "x train", "sequences", "loss", "perplexity", "bits per byte")]
    for row in (*rows, *baselines.values()):
        cells.append(
            (
                f"{row.length:,}",
                f"{row.length / train_length:g}",
                f"{row.sequences:,}",
                _measured(row.loss, row.stderr, 4),
                _measured(row.perplexity, row.perplexity_stderr, 3),
                _measured(row.bits_per_byte, row.bits_per_byte_stderr, 4),
            )
        )
    text = (" " + pd.DataFrame(cells)).to_string(index=False, header=False)
    head, *lines = (line[1:] for line in text.splitlines())
    for number, label in enumerate(baselines):
        lines.insert(len(rows) + 2 * number, f"same model, {label}:")
    rule = "-" * len(head)
    return "\n".join([title, head, rule, *lines, "(± one standard error over sequences)"])


def _measured(value: float, error: float, digits: int) -> str:
    """Format `value ± error`, or only the value if the error is NaN (for a single sequence)."""
    return f"{value:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def extrapolation_figure(
    rows: Sequence[LengthResult], train_length: int, baselines: Baselines, title: str
) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.3), layout="constrained")
    axes = figure.add_subplot()
    lengths = [row.length for row in rows]
    values = [row.perplexity for row in rows]
    axes.errorbar(
        lengths, values, yerr=[row.perplexity_stderr for row in rows],
        marker="o", markersize=4, capsize=3, color="tab:blue", label="perplexity ± standard error",
    )  # fmt: skip
    shown = list(values)
    styles = itertools.cycle(("dotted", "dashdot"))
    for (label, baseline), style in zip(baselines.items(), styles, strict=False):
        shown.append(baseline.perplexity)
        axes.axhline(
            baseline.perplexity, color="tab:red", linestyle=style, label=f"same model, {label}"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    mark_training_length(axes, train_length)
    # Leave room above and below, so that noise on a flat curve does not fill the plot.
    lowest, highest = min(shown), max(shown)
    if math.isfinite(highest) and lowest > 0:
        axes.set_ylim(lowest * 0.85, highest * 1.15)
        if highest > 10 * lowest:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
    axes.set(xlabel="sequence length (tokens)", ylabel="perplexity", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def kernels_figure(
    panels: Sequence[tuple[str, np.ndarray]], distance_n: np.ndarray, train_length: int
) -> Figure:
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 3.6 * len(panels)), layout="constrained")
    on_axis = distance_n >= 1
    for axes, (label, values_hn) in zip(
        figure.subplots(len(panels), squeeze=False).flat, panels, strict=True
    ):
        heads = len(values_hn)
        colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, heads))
        for head, (values, colour) in enumerate(zip(values_hn, colours, strict=True)):
            axes.plot(distance_n[on_axis], values[on_axis], color=colour, label=f"head {head}")
        axes.set_xscale("log")
        mark_training_length(axes, train_length)
        axes.set(xlabel="distance $d$ (tokens)", ylabel=label)
        axes.grid(alpha=0.3)
        if heads <= 16:
            axes.legend(frameon=False, fontsize="x-small", ncols=2)
    return figure


def mark_training_length(axes: Axes, train_length: int) -> None:
    label = f"training length {train_length:,}"
    axes.axvline(train_length, color="0.4", linestyle="--", linewidth=1, label=label)


def figure_png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150)
    return out.getvalue()
