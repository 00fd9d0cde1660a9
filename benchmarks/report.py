"""Write the results of a benchmark: a Markdown table, a CSV file and a plot."""

from __future__ import annotations

import csv
import datetime
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron import pictures


def facts(script: str) -> list[str]:
    """Return the lines that every table begins with: date, machine and command.

    Args:
        script: The path of the benchmark in the repository.
    """
    return [
        f"{datetime.date.today()}, {processor()}, {len(os.sched_getaffinity(0))} cores, Python "
        f"{platform.python_version()}",
        f"`python {script} {' '.join(without_folders(sys.argv[1:]))}`",
    ]


def write(
    out: str | None,
    title: str,
    about: list[str],
    rows: list[dict],
    draw: Callable[[Any, list[dict]], None],
) -> None:
    """Print the table. If `out` is not None, write OUT.md, OUT.csv, OUT.png and OUT.svg.

    Args:
        about: The facts above the table.
        rows: The rows, which have the same keys.
        draw: A function of a matplotlib figure and the rows that plots them.
    """
    lines = [f"# {title}", "", *(f"- {fact}" for fact in about), ""]
    lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(map(str, row.values())) + " |" for row in rows]
    print("\n".join(lines))
    if not out:
        return
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.md").write_text("\n".join(lines) + "\n")
    with open(f"{out}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    picture(Path(f"{out}.png"), f"{title}\n{about[0]}", lambda figure: draw(figure, rows))


def picture(path: Path, title: str, draw: Callable[[Any], None], height: float = 4.4) -> None:
    """Save what `draw` plots on a figure as PNG and SVG, if matplotlib is installed.

    Args:
        title: What was measured, where, and the date.
        height: The height of the figure, in inches.
    """
    if not find_spec("matplotlib"):
        return
    with pictures.in_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, height), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left")
        draw(figure)
        pictures.save(figure, path)


def bars(axes: Any, names: Sequence[str], values: Mapping[str, Sequence[float]], form: str) -> None:
    """Draw horizontal bars from the top down, with their numbers, in a group for each name.

    Args:
        values: Maps the label of each bar of a group to its values, one for each name. A label that
            is "" is not shown.
        form: The format of the numbers, such as `{:,.1f}`.
    """
    width = 0.8 / len(values)
    for number, (label, lengths) in enumerate(values.items()):
        places = [i + width * number for i in range(len(names))]
        drawn = axes.barh(places, lengths, width, label=label)
        axes.bar_label(drawn, fmt=form, padding=3, fontsize="x-small")
    middle = width * (len(values) - 1) / 2
    axes.set_yticks([i + middle for i in range(len(names))], names)
    axes.grid(visible=False, axis="y")
    axes.margins(x=0.12)
    axes.invert_yaxis()


def without_folders(arguments: list[str]) -> list[str]:
    """Return the arguments, with absolute paths reduced to their last component."""
    return [Path(a).name if os.path.isabs(a) else a for a in arguments]


def processor() -> str:
    """Return the processor's name, family and model, or its architecture if they are unknown.

    Some machines give one name, such as "AMD EPYC", to processors that differ much in speed.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    pairs = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    if "model name" not in pairs:
        return platform.machine()
    numbers = [f"{key} {pairs[key]}" for key in ("cpu family", "model") if key in pairs]
    return f"{pairs['model name']} ({', '.join(numbers)})" if numbers else pairs["model name"]
