"""Write the results of an evaluation by length: a table, two CSV files, and two plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron import pictures
from megatron.config import Config
from megatron.evaluation.perplexity_statistics import LengthResult
from megatron.files import replace_table
from megatron.readable_numbers import now
from megatron.run_folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Baselines = Mapping[str, LengthResult]
"""Maps descriptions to results of the same model with a short context."""
LINEAR = 50.0  # the largest absolute bias or weight that is drawn on a linear axis


def write_extrapolation(
    rows: Sequence[LengthResult], run_dir: Path, train_length: int, baselines: Baselines,
    title: str, about: Mapping[str, Any],
) -> str:  # fmt: skip
    """Write the perplexity by length as `extrapolation.csv`, `.png` and `.svg`; return a table.

    The table is a text. The CSV files of an earlier evaluation are kept, with `.previous` added to
    their names.

    Args:
        rows: The result of each length, in any order.
        run_dir: The folder for the files.
        train_length: The training length in tokens, which the plot marks.
        baselines: Maps descriptions to results of the model with a short context. The table, the
            plot and `context_baseline.csv` contain these results.
        title: The title of the table and of the plot.
        about: Columns to add to the CSV files. Each column has the same value in all rows.

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
    pictures.save(figure, run.extrapolation.with_suffix(".png"))
    return _table(rows, train_length, baselines, title)


def picture_title(what: str, name: str, config: Config, step: int, lengths: str = "") -> str:
    """Return the title of a picture. It names the content, the model, the data and the date.

    Args:
        what: A text that names the content of the picture.
        name: The name of the model's positional embedding.
        config: The config of the model.
        step: The number of optimizer steps that the model was trained for.
        lengths: The training lengths as text. With "", the title names the config's `seq_length`.
    """
    model, data = config.model, config.data
    paths = data.data_path or data.valid_data_paths
    texts = [paths] if isinstance(paths, str) else list(paths)
    text = f"{len(texts)} texts" if len(texts) > 1 else Path(*texts).name
    return (
        f"{what} of {name}, {model.num_layers} layers of width {model.hidden_size}, step {step:,}\n"
        f"{text}, trained at {lengths or f'{model.seq_length:,} tokens'}, {now()[:10]}"
    )


def csv_of(table: Any) -> bytes:
    """Return a table as the content of a CSV file.

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
        measured = (
            _measured(row.loss, row.stderr, 4),
            _measured(row.perplexity, row.perplexity_stderr, 3),
            _measured(row.bits_per_byte, row.bits_per_byte_stderr, 4),
        )
        times = f"{row.length / train_length:g}"
        cells.append((f"{row.length:,}", times, f"{row.sequences:,}", *measured))
    text = (" " + pd.DataFrame(cells)).to_string(index=False, header=False)
    head, *lines = (line[1:] for line in text.splitlines())
    for number, label in enumerate(baselines):
        lines.insert(len(rows) + 2 * number, f"same model, {label}:")
    rule = "-" * len(head)
    return "\n".join([title, head, rule, *lines, "(± one standard error over sequences)"])


def _measured(value: float, error: float, digits: int) -> str:
    """Format `value ± error`. If the error is NaN (for a single sequence), format only `value`."""
    return f"{value:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def extrapolation_figure(
    rows: Sequence[LengthResult], train_length: int, baselines: Baselines, title: str
) -> Figure:
    """Plot the perplexity by length, and each baseline as a horizontal line.

    A band shows one standard error above and below the perplexity.

    Args:
        rows: The result of each length.
        train_length: The training length in tokens, which the plot marks.
        baselines: Maps the name of each baseline to its result.
        title: The title of the figure.
    """
    lengths = [row.length for row in rows]
    values = np.array([row.perplexity for row in rows])
    errors = np.nan_to_num([row.perplexity_stderr for row in rows])
    band, style = (values - errors, values + errors), {"linestyle": "--", "marker": ""}
    curves = [pictures.Curve("perplexity ± standard error", lengths, values, band)]
    for label, each in baselines.items():
        curves.append(pictures.Curve(label, lengths, 0 * values + each.perplexity, style=style))
    xlabel = "sequence length (tokens)"
    return pictures.by_length(title, [curves], xlabel, "perplexity", train_length)


@pictures.in_style()
def kernels_figure(
    kernels: Mapping[str, np.ndarray], distance_n: np.ndarray, train_length: int, title: str
) -> Figure:
    """Plot the distance kernel of each head.

    The x axis is logarithmic, so the distance 0 is left out. If a bias or weight is larger than
    LINEAR, the y axis is linear from -1 to 1 and logarithmic elsewhere. This makes the curves of
    all heads visible.

    Args:
        kernels: Maps the label of a y axis to values [H, n] of H heads at n distances.
        distance_n: The distances in tokens, [n].
        train_length: The training length in tokens, which the plot marks.
        title: The title of the figure.
    """
    parts = [
        (label, values_Hn, heads)
        for label, values_Hn in kernels.items()
        for heads in pictures.divided(range(len(values_Hn)))
    ]
    figure, plots = pictures.panels(title, len(parts), height=3.2)
    on_axis = distance_n >= 1
    for axes, (label, values_Hn, heads) in zip(plots, parts, strict=True):
        for number, head in enumerate(heads):
            x, y = distance_n[on_axis], values_Hn[head][on_axis]
            axes.plot(x, y, marker="", color=f"C{number}", label=f"head {head}")
        axes.sharey(next(plot for plot, part in zip(plots, parts, strict=True) if part[0] == label))
        if np.abs(values_Hn).max() > LINEAR:
            axes.set_yscale("symlog", linthresh=1.0)
        axes.yaxis.set_major_formatter(pictures.PLAIN)
        axes.set_xscale("log")
        pictures.plain_ticks(axes.xaxis, 1.0, float(distance_n.max()))
        pictures.mark_training_length(axes, train_length)
        axes.set(xlabel="distance d (tokens)", ylabel=label)
    pictures.label_lines(plots)
    return figure
