"""Write the results of a grid as Markdown, LaTeX, CSV and one HTML file that contains its plots.

A grid is a set of training runs. matplotlib is imported inside functions, as elsewhere in this
project.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pandas as pd

from megatron import pictures
from megatron.embedding_names import PUBLISHED_POSITIONAL_NAMES
from megatron.files import parse_json, read_small, write_text
from megatron.readable_numbers import decimals
from megatron.shipped import ROOT
from megatron.templates import render
from tools.experiments.claims import Verdict, significant
from tools.experiments.grid import Grid, filled
from tools.experiments.grid_pictures import by_length
from tools.experiments.moved_theta import VALUES
from tools.experiments.results import CURVES, GAINS, Frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = ROOT / "configs" / "paper" / "tables.json"
MOVED_NOTE = (
    "What training did to the kernels' parameters: means over heads and seeds. Change: the root "
    "mean square over heads of end minus start. Of the start: this change, divided by the root "
    "mean square of the start."
)
PaperRows = dict[str, dict[str, list[float]]]
"""Maps the paper's name of an embedding, and a length, to (mean, standard deviation)."""
_LATEX = {"±": r"$\pm$", "†": r"$^\dagger$"}


@dataclass
class Section:
    """A section of a report, with a table and plots.

    Attributes:
        title: The title of the section.
        table: The formatted results, with a column for each length.
        note: A text that explains the table.
        moved: A formatted table of how far training moved the kernels' parameters. It may be empty.
        pictures: Maps the caption of each picture to a figure, or to the path of the picture's
            file.
    """

    # An axis is a setting that differs between the runs of a grid. The rows of the table are the
    # values of one axis. On every other axis, all runs in a section have the same value.

    title: str
    table: Frame
    note: str
    moved: Frame
    pictures: dict[str, Figure | Path] = field(default_factory=dict)


def sections(
    results: Frame,
    moved: Frame,
    rows: str,
    metric: str,
    grid: Grid | None,
    against_paper: bool,
    about: str,
) -> list[Section]:
    """Return the sections of a report.

    Args:
        results: The results of all runs.
        moved: A table of how far training moved the positional parameters of each run.
        rows: The name of the setting whose values are the rows of the tables.
        metric: The name of the metric that the tables show.
        grid: The grid of the results; None for single run folders.
        against_paper: Whether the tables also show the paper's numbers.
        about: The second line of the title of each picture: the models, the data and the date.
    """
    # There is a section for each combination of values of the axes other than `rows`. `results`
    # comes from `results.of_grid` or `results.of_folders`, and `moved` from `moved_theta.of_runs`.
    chosen = results.astype({"value": float})
    axes = [axis for axis in (grid.about.axes if grid else []) if axis != rows]
    found = []
    for names, measured in chosen.groupby(axes, sort=False) if axes else [((), chosen)]:
        part = measured[measured["metric"] == metric]
        known = dict(zip(axes, map(str, names), strict=True))
        paper = _paper_of(grid, known) if grid and against_paper else {}
        compare = grid.about.compare if grid else ""
        alpha = grid.about.alpha if grid else 0.0
        marked = significant(part, rows, compare, metric, alpha) if compare else set()
        note = f"{metric}, mean ± standard deviation over seeds"
        if compare:
            note += f"; † differs from {compare} (paired t test, Holm, {alpha:g})"
        if paper:
            note += "; in brackets: the paper's"
        title = ", ".join(known.values()) or "all runs"
        own = moved[moved["folder"].isin(part["folder"])]
        gains = measured[measured["metric"].isin(GAINS.values())]
        if len(gains):
            note += (
                "; gains in nats through text beyond the training length, see docs/evaluation.md"
            )
        table = _table(part, rows, marked, paper, gains)
        section = Section(title, table, note, _moved(own, rows))
        curves = {metric: part} | {
            curve: measured[measured["metric"] == curve] for curve in CURVES.values()
        }
        for name, values in curves.items():
            if values["value"].notna().any():
                head = f"{name.capitalize()}, mean ± standard deviation over seeds"
                head += f": {title}\n{about}" if known else f"\n{about}"
                section.pictures[f"{name} by length"] = by_length(values, rows, name, head)
        for row, runs in part.groupby(rows):
            folder = Path(runs["folder"].iloc[0])
            for path in sorted([*folder.glob("kernels*.svg")] or [*folder.glob("kernels*.png")]):
                section.pictures[f"The kernels of {row}, {path.stem}"] = path
        found.append(section)
    return found


def write(
    out: Path,
    head: Mapping[str, str],
    found: Sequence[Section],
    verdicts: Sequence[Verdict],
    remarks: Sequence[str],
    tables: Mapping[str, Frame],
) -> list[Path]:
    """Write the report, its tables and its plots into the folder `out`.

    The files are `report.html`, `tables.md`, `tables.tex`, `verdicts.csv`, `by_length*.png`,
    `by_length*.svg`, and the CSV files in `tables`.

    Args:
        out: The folder.
        head: The texts at the head of the report, such as `title`, `question` and `methods`.
        found: The sections of the report.
        verdicts: The verdicts on claims.
        remarks: Remarks for the reader.
        tables: Maps the name of each CSV file to its content. Empty tables are not written.

    Returns:
        The paths of all files except the plots.
    """
    # The files are `report.html`, `tables.md`, `tables.tex`, `verdicts.csv`, `by_length*.png`, and
    # the CSV files in `tables`.
    out.mkdir(parents=True, exist_ok=True)
    latex = []
    for each in found:
        caption = f"{each.title}: {each.note}.".replace("_", r"\_")  # `escape` is for cells
        text = each.table.to_latex(index=False, escape=True, caption=caption)
        for sign, command in _LATEX.items():
            text = text.replace(sign, command)
        latex.append(text)
    files = {
        "tables.md": page("md", head, found, verdicts, remarks),
        "tables.tex": "\n".join(latex),
        "report.html": page("html", head, found, verdicts, remarks),
    }
    verdicts_csv = pd.DataFrame([asdict(each) for each in verdicts])
    for name, table in {**tables, "verdicts.csv": verdicts_csv}.items():
        files |= {name: table.to_csv(index=False)} if len(table) else {}
    for name, text in files.items():
        write_text(out / name, text)
    for number, each in enumerate(found):
        for figure in list(each.pictures.values())[:1]:
            pictures.save(cast(Any, figure), out / f"by_length{number or ''}.png")
    return [out / name for name in files]


def change_of(verdict: Verdict) -> tuple[str, str]:
    """Return the change in a verdict and the interval of the change, both as texts.

    The texts look like `-4.39%` and `-5.85 to -2.92`. The interval has 95% confidence.
    """
    # All three numbers have the same number of decimals, at least two.
    values = verdict.change, verdict.low, verdict.high
    largest = max(map(abs, values))
    style = f"+.{max(2, decimals(largest, 2))}f" if largest < 1e6 else "+.3g"
    change, low, high = (f"{value:{style}}" for value in values)
    return f"{change}{verdict.unit}", f"{low} to {high}"


def _paper_of(grid: Grid, known: dict[str, str]) -> PaperRows:
    """Return the paper's results as nested dicts: row -> length -> [mean, standard deviation]."""
    # `known` maps axes of the grid to the values in one section of the report. The result is {} if
    # the paper has no numbers for the grid's table and corpus.
    if grid.about.paper is None:
        return {}
    tables = parse_json(PAPER.read_text(encoding="utf-8"))["tables"]
    corpus = filled(grid.about.paper.corpus, {**grid.variables, **known})
    return tables.get(filled(grid.about.paper.table, grid.variables), {}).get(corpus, {})


def _table(
    results: Frame, rows: str, marked: set[tuple[str, int]], paper: PaperRows, gains: Frame
) -> Frame:
    lines, lengths = [], [f"{length:,}" for length in sorted(results["length"].unique())]
    for row, part in results.groupby(rows, sort=False):
        by_length = paper.get(PUBLISHED_POSITIONAL_NAMES.get(str(row), str(row)), {})
        line = {rows: row, "seeds": str(part["seed"].nunique()), **dict.fromkeys(lengths, "")}
        for length, values in part.groupby("length")["value"]:
            text = _number(mean := values.mean())
            several = len(values) > 1 and mean < math.inf
            text += f" ± {_number(values.std(), mean)}" if several else ""
            text += " †" if (row, length) in marked else ""
            if theirs := by_length.get(str(length)):
                text += f" ({theirs[0]:g} ± {theirs[1]:g})"
            line[f"{length:,}"] = text
        for metric, values in gains[gains[rows] == row].groupby("metric")["value"]:
            error = f" ± {values.std(skipna=False):.4f}" if len(values) > 1 else ""
            line[str(metric)] = f"{values.mean(skipna=False):+.4f}{error}"
        lines.append(line)
    return pd.DataFrame(lines).fillna("")


def _moved(moved: Frame, rows: str) -> Frame:
    """Format the table of how far training moved the parameters.

    The result has one line for each value of the axis `rows` and each parameter.
    """
    # It has a line for each parameter and each value of the axis `rows`, with means over the seeds.
    runs = moved.astype(dict.fromkeys(VALUES, float)).groupby([rows, "parameter"], sort=False)
    lines = runs[VALUES].mean().map("{:.3g}".format)
    lines.insert(0, "seeds", runs["seed"].nunique().astype(str))
    lines["change"] = runs["change"].mean().map("{:.2g}".format)
    relative = runs["relative"].mean()  # nan for a start of 0
    lines["relative"] = relative.map("{:.0%}".format).where(relative.notna(), "")
    return lines.rename(columns={"relative": "of the start"}).reset_index()


def _number(value: float, like: float | None = None) -> str:
    """Format `value` with four significant digits.

    If `like` is given, use the number of decimals that `like` has with four significant digits.
    """
    return f"{value:,.{decimals(value if like is None else like, 4)}f}"


def page(
    kind: str, head: Mapping[str, str], found: Sequence[Section], verdicts: Sequence[Verdict],
    remarks: Sequence[str],
) -> str:  # fmt: skip
    """Return the report as one page.

    Args:
        kind: The format of the page, `html` or `md`.
        head: The texts at the head of the report, such as `title`, `question` and `methods`.
        found: The sections of the report.
        verdicts: The verdicts on claims.
        remarks: Remarks for the reader.
    """
    filters = {
        "address": _address,
        "numbers": _numbers,
        "sentence": lambda text: text[:1].upper() + text[1:],
        "table": lambda table: table.to_html(index=False, border=0),
    }
    given = {"about": head, "sections": found, "verdicts": verdicts, "remarks": remarks}
    template = Path(__file__).with_name(f"grid_report.{kind}.j2")
    return render(template, filters, moved_note=MOVED_NOTE, **given)


def _address(picture: Figure | Path) -> str:
    """Return an address (a data URL) that contains the picture itself.

    The picture is a figure, or an SVG or PNG file.
    """
    kind = "png" if isinstance(picture, Path) and picture.suffix == ".png" else "svg+xml"
    content = read_small(picture, 1 << 27) if isinstance(picture, Path) else pictures.svg(picture)
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _numbers(verdict: Verdict) -> str:
    """Return the numbers of a verdict as text: `-4.39%, 95% interval -5.85 to -2.92, ...`."""
    if math.isnan(verdict.p):
        return "A value is not finite." if verdict.seeds > 1 else "Too few runs have measured it."
    change, interval = change_of(verdict)
    corrected = f"{verdict.holm:.2g} after Holm's correction"
    if math.isnan(verdict.holm):
        corrected = "not corrected: another part of the claim was not tested"
    return (
        f"{change}, 95% interval {interval}, {verdict.seeds} seeds, p = {verdict.p:.2g} "
        f"({corrected})"
    )
