"""Write the suite's report: `report.md`, `report.json`, and a CSV and a PNG for each measure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron import pictures
from megatron.evaluation.length_report import csv_of
from megatron.evaluation.suite.intervals import LEVEL
from megatron.evaluation.suite.measure import Measure, Row
from megatron.files import replace_table, write_text
from megatron.readable_numbers import now
from megatron.templates import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, DATA = "report.md", "report.json"


@dataclass(frozen=True)
class Report:
    """The results of all measures of one model.

    Attributes:
        title: A text that names the model.
        about: The settings of the measurement, which become columns of each CSV file.
        facts: Maps names to facts about the model and the text, for the head of the page.
        verdict: Sentences about all measures together. The first sentence tells how much context
            the model uses.
        measures: The measures with their results.
    """

    title: str
    about: dict[str, Any]
    facts: dict[str, Any]
    verdict: list[str]
    measures: list[Measure]


def write_report(report: Report, folder: Path, train_length: int) -> None:
    """Write all files of the report into `folder`.

    Tables of an earlier report are kept, with `.previous` added to their names.

    Args:
        report: The report.
        folder: The folder.
        train_length: The training length in tokens, which the pictures mark.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [each for each in report.measures if each.drawn and len(each.rows) > 2]
    # An earlier report may have had results of more measures, and a model with more layers.
    tables = dict[str, bytes | None].fromkeys(path.stem for path in folder.glob("heads*.csv"))
    for measure in report.measures:
        lines = [row.flat() | report.about for row in measure.rows]
        tables[measure.name] = csv_of(lines) if lines else None
    for name, table in tables.items():
        replace_table(folder / f"{name}.csv", table)
        for ending in (".png", ".svg"):
            (folder / name).with_suffix(ending).unlink(missing_ok=True)
    for each in drawn:
        pictures.save(_picture(each, train_length, report.title), folder / f"{each.name}.png")
    template, level = Path(__file__).with_name("suite_report.md.j2"), f"{LEVEL:.0f}%"
    text = render(template, {"shown": _shown_row}, report=report, drawn=drawn, level=level)
    write_text(folder / PAGE, text)
    content = {"title": report.title, "verdict": report.verdict, "facts": report.facts}
    content["measures"] = {
        measure.name: {
            "unit": measure.unit,
            "says": measure.says,
            "answer": measure.answer,
            "rows": [{key: _json(x) for key, x in row.flat().items()} for row in measure.rows],
        }
        for measure in report.measures
    }
    write_text(folder / DATA, json.dumps(content, indent=1, allow_nan=False) + "\n")


def _json(value: Any) -> Any:
    """Return `value`. For a number that JSON cannot represent (NaN or infinity), return None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _shown_row(row: Row) -> list[str]:
    """Return the texts of the cells that show a row in a table."""
    found = row.estimate
    interval = "none" if math.isnan(found.low) else f"{found.low:.4f} to {found.high:.4f}"
    at, also = ([*map(_shown, part.values())] for part in (row.at, row.also))
    return [*at, f"{found.value:.4f}", interval, str(found.documents), *also]


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _picture(measure: Measure, train_length: int, title: str) -> Figure:
    """Plot the results of `measure` with their intervals.

    The first entry of `Row.at` is the x axis. Each combination of the other entries is a curve.
    """
    import pandas as pd

    label, *others = measure.rows[0].at
    table = pd.DataFrame([row.flat() for row in measure.rows])
    table["curve"] = [
        ", ".join(f"{name} {row.at[name]}" for name in others) for row in measure.rows
    ]
    curves = []
    for name, part in table.sort_values(label, kind="stable").groupby("curve"):
        low, high = (part[end].fillna(part["value"]) for end in ("low", "high"))
        curves.append(pictures.Curve(str(name), part[label], part["value"], (low, high)))
    title = f"{measure.title}\n{title}, {now()[:10]}"
    groups, xlabel = pictures.divided(curves), f"{label} (tokens)"
    return pictures.by_length(title, groups, xlabel, measure.unit, train_length, fit=False)
