"""Read the results of finished runs into one table: a row for each run, length and metric.

In a run folder, a CSV file is read if it has a column `length`, with one row for each length, and a
column for at least one metric in `METRICS`. If several files contain the same result, that of
`extrapolation.csv` or `accuracy.csv` is used. In the folder `suite`, which `evaluate.py --suite`
writes, only the files in `CURVES` and `GAINS` are read. In these files, the column `context` is the
length.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from megatron.config.reader import read_file
from megatron.data.errors import DataError
from megatron.run_folder import RunFolder
from tools.experiments.description import COLUMNS, METRICS
from tools.experiments.grid import Grid
from tools.experiments.state import (
    Frame,
    Record,
    other_measurement,
    read_table,
    state_of,
    why_not_measured,
)

CURVES = {"by_position": "loss by position", "receptive_field": "loss by context"}
"""Maps each file of the folder `suite` that is read to the name of its metric in a report."""


GAINS = {"exact_context": "far gain", "windowed_twin": "twin's gain"}
"""Maps files of the folder `suite` to the names of their metrics; the first row counts.

Both are gains in nats per token through text beyond the training length W: over a control that
reads exactly W tokens before each scored token, and over the windowed twin.
"""


def of_grid(grid: Grid) -> tuple[Frame, list[str]]:
    """Return (table of the results of all finished runs of a grid, remarks).

    Args:
        grid: A set of training runs. The table has a column for each setting that differs between
            the runs.
    """
    # The runs are called cells, and the settings axes. There is a remark for each cell that is left
    # out, and for each cell whose results are stale (see `state_of`).
    parts, remarks, codes = [], [], {}
    for cell in grid.cells:
        state, why = state_of(cell)
        record = Record.read(cell.folder)
        if not record or state == "cut off" or "finished" not in (state, record.state):
            remarks.append(f"{cell.name}: {': '.join(filter(None, (state, why)))}, not counted")
            continue
        if state == "stale":
            remarks.append(f"{cell.name}: stale ({why})")
        try:
            if other := why_not_measured(cell.folder, record):
                raise DataError(other)
            found, left_out = of_run(cell.folder, record)
        except DataError as error:
            remarks.append(f"{cell.name}: {error}, not counted")
            continue
        remarks += [f"{cell.name}: {why}, not counted" for why in left_out]
        codes.setdefault(tuple(sorted(record.code.items())), []).append(cell.name)
        about = {"cell": cell.name, **cell.axes, "seed": cell.seed, "folder": str(cell.folder)}
        parts.append(found.assign(**about))
    if len(codes) > 1:
        groups = "; ".join(
            f"{dict(code).get('megatron')}: {len(names)}" for code, names in codes.items()
        )
        remarks.append(f"the cells were run by {len(codes)} versions of the code ({groups} cells)")
    empty = pd.DataFrame(columns=[*COLUMNS, *grid.about.axes])
    return (pd.concat(parts, ignore_index=True) if parts else empty), remarks


def of_folders(folders: Sequence[Path]) -> Frame:
    """Return the results of run folders as a table. The runs need not be cells of a grid.

    The column `embedding` contains the run's `pos_emb`, or the name of its folder.

    Raises:
        OSError: A folder has no `config.yml`.
        DataError: A folder is given twice, or a table of results is damaged.
    """
    # The folder's name is used if several folders have the same `pos_emb` and seed, and the path
    # as it was given if several folders have the same name.
    places = [folder.resolve() for folder in folders]
    lasts, found = [place.name for place in places], []
    for number, folder in enumerate(folders):
        if places[number] in places[:number]:
            raise DataError(f"{folder} is given twice; name each run once")
        settings, problems = read_file(RunFolder(folder).config)
        if problems:
            raise OSError(str(problems[0]))
        keys = {path[0]: given.value for path, given in settings.items()}
        found.append((str(keys.get("pos_emb")), keys.get("seed", 0)))
    parts = []
    for (embedding, seed), folder, last in zip(found, folders, lasts, strict=True):
        name = last if lasts.count(last) == 1 else str(folder)
        row = embedding if found.count((embedding, seed)) == 1 else name
        about = {"cell": name, "embedding": row, "seed": seed, "folder": str(folder)}
        parts.append(of_run(folder)[0].assign(**about))
    return pd.concat(parts, ignore_index=True)


def of_run(folder: Path, record: Record | None = None) -> tuple[Frame, list[str]]:
    """Return (table of the results in one run folder, reasons why files were left out).

    The table has the columns `length`, `metric` and `value`.

    Args:
        folder: The run folder.
        record: The record of the run's inputs. Results of the suite are left out if they were
            measured with settings that are not those in `record`. If `record` is None, no results
            are left out.

    Raises:
        DataError: A table is damaged.
    """
    # The record is the content of `cell.json`. The results that it selects are those of
    # `evaluate.py --suite`.
    parts: list[Any] = []
    left_out: list[str] = []
    run = RunFolder(folder)
    own = [path for path in run.results if path.exists()]
    for path in dict.fromkeys([*own, *sorted(folder.glob("*.csv"))]):
        table = read_table(path)
        metrics = [name for name in METRICS if name in table]
        if metrics and "length" in table and table["length"].is_unique:
            # A loss that is not a number is that of a diverged run, and must not be left out.
            table = table.fillna({x: math.inf for x in metrics if METRICS[x] and path in own})
            parts.append(_checked(path, table.melt("length", metrics, "metric", "value")))
    for name, metric in (CURVES | GAINS).items():
        path = run.suite / f"{name}.csv"
        if not path.exists():
            continue
        table = read_table(path)
        if not {"context", "value"} <= {*table}:
            raise DataError(f"{path}: has no columns `context` and `value`")
        if record is not None and (other := other_measurement(path, table, record)):
            left_out.append(other)
        else:
            table = table.head(1) if name in GAINS else table
            curve = {"length": table["context"], "metric": metric, "value": table["value"]}
            parts.append(_checked(path, pd.DataFrame(curve)))
    parts = parts or [pd.DataFrame(columns=["length", "metric", "value"])]
    found = pd.concat(parts, ignore_index=True).drop_duplicates(["length", "metric"])
    return found, left_out


def _checked(path: Path, table: Frame) -> Frame:
    """Check that `length` and `value` are columns of numbers in `table`, and return the table.

    Raises:
        DataError: A length or a value is not a number.
    """
    try:
        whole = table["length"].astype(float) % 1 == 0
        return table.where(whole).astype({"length": int, "value": float})
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{path}: a length or a value is not a number ({error})") from None
