"""Find the state of each cell (run) of a grid, from the file `cell.json` in its run folder.

A run is finished if it took its last step and measured all lengths. A run is *stale* if its
resolved config, its text or the code has changed since the run began. A stale run is neither
continued nor repeated, unless the user decides otherwise.

In two cases the run is not stale: only keys of the evaluation have changed, or another evaluation
has replaced the results. The run is then continued, and its lengths are measured again.
"""

from __future__ import annotations

import io
import json
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field, TypeAdapter

from megatron.config import Config, ConfigError
from megatron.config.sections.data import EvaluationConfig
from megatron.data.errors import DataError
from megatron.files import read_small, write_text
from megatron.run_folder import RunFolder
from megatron.version import fingerprint
from tools.experiments.grid import Cell

RECORD = "cell.json"
INDEX = "cells.csv"
Frame = Any
"""A table or a column of pandas, whose types basedpyright cannot infer."""
SIZES = ("eval_tokens", "eval_sequences", "eval_examples", "eval_suite_tokens")
"""The keys of the config that say on how much text a table was measured."""
_MOST_BYTES = 1 << 24
_PLACES = ("save", "load", "data_dir", "use_wandb", "wandb")

State = Literal["new", "running", "cut off", "failed", "finished", "stale"]


@dataclass
class Record:
    """The inputs of one run of a grid, and how the run ended.

    Attributes:
        cell: The name of the run in the grid.
        axes: Maps each setting that differs between the runs to the value in this run.
        seed: The seed of the run.
        config: The resolved config, without the folders of the run.
        text: The fingerprint of the tokens on which the run trains.
        code: The fingerprint of the code, and the versions of the libraries that compute.
        host: The name of the machine.
        seconds: The wall time of the run so far, in all processes that started or continued it.
        state: How the last of these processes ended, or `running` if it has not ended.
    """

    # This is the content of `cell.json`. For a run that trains on a length task, `text` is the
    # identity of the task.

    cell: str
    axes: dict[str, str]
    seed: int
    config: dict[str, Any]
    text: str
    code: dict[str, str]
    host: str = field(default_factory=platform.node)
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    state: State = "running"

    @classmethod
    def of(cls, cell: Cell) -> Record:
        """Return the record of a run of `cell` that starts now.

        Raises:
            ConfigError: The cell's config has problems.
            DataError: The cell's tokens cannot be read.
        """
        config = cell.config()
        return cls(cell.name, cell.axes, cell.seed, settings(config), text_of(config), code())

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """Read the record in a run folder. Return None if the record is missing or damaged."""
        with suppress(OSError, ValueError):
            return _RECORD.validate_json(read_small(folder / RECORD, _MOST_BYTES))
        return None

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / RECORD, json.dumps(asdict(self), indent=1))


_RECORD = TypeAdapter(Record)


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that can change results, as a dict from config key to JSON value."""
    flat = json.loads(json.dumps(config.to_flat_dict()))
    found = {key: value for key, value in flat.items() if not key.startswith(_PLACES)}
    load, save = config.checkpoint.load, config.checkpoint.save
    return found if load == save else found | {"load": load}


def code() -> dict[str, str]:
    """Return a fingerprint of the code that trains, and the versions of Python and of libraries."""
    libraries = {name: version(name) for name in ("torch", "deepspeed", "numpy")}
    return {"megatron": fingerprint(), "python": platform.python_version(), **libraries}


_texts: dict[str, str] = {}


def text_of(config: Config) -> str:
    """Return the fingerprint of the text (tokens) on which a run with this config trains.

    Raises:
        DataError: The tokens cannot be read.
    """
    # If it trains on a length task, the identity of the task is returned.
    key = repr(config.data)
    if key not in _texts:
        # This import takes seconds, and a new grid can be listed without it.
        from megatron.engine.build import tokenizer_of
        from megatron.engine.open_text import open_text

        _texts[key] = open_text(config, tokenizer_of(config)).content()
    return _texts[key]


def state_of(cell: Cell) -> tuple[State, str]:
    """Return (state of a run of a grid, explanation). The explanation may be empty."""
    record = Record.read(cell.folder)
    if record is None:
        if RunFolder(cell.folder).latest.exists():
            why = f"and tools/sweep.py did not start it, or its {RECORD} is damaged"
            return "stale", f"{cell.folder} holds a run, {why}"
        return "new", ""
    try:
        config = cell.config()
    except ConfigError as error:
        return "stale", str(error)
    now: dict[str, Any] = {**settings(config), "code": code()}
    then = {**record.config, "code": record.code}
    keys = [key for key in {**now, **then} if then.get(key) != now.get(key)]
    changed = [f"{key}: {then.get(key)} -> {now.get(key)}" for key in keys]
    if set(keys) <= EvaluationConfig.model_fields.keys():
        try:
            text = text_of(config)
        except DataError:
            text = record.text  # results are still shown where the text is no longer there
        if text != record.text:
            changed.append("the text has another fingerprint")
        elif changed:
            return "cut off", "; ".join(changed)
        elif record.state == "finished" and (why := why_not_measured(cell.folder, record)):
            return "cut off", why
    if changed:
        return "stale", "; ".join(changed)
    # A run that is recorded as running may have ended before its sweep could record it.
    ended = record.state == "running" and is_complete(cell.folder, record)
    return "finished" if ended else record.state, ""


def is_complete(folder: Path, record: Record) -> bool:
    """Return whether a run took its last step and measured all lengths.

    Args:
        folder: The run folder.
        record: The record of the run's inputs.
    """
    step = RunFolder(folder).newest_step()
    return step >= record.config["train_iters"] and not why_not_measured(folder, record)


def why_not_measured(folder: Path, record: Record) -> str:
    """Return why a run folder has no results with the settings in `record`.

    If there are such results, return "".
    """
    paths = [path for path in RunFolder(folder).results if path.exists()]
    try:
        found = [other_measurement(path, read_table(path), record) for path in paths]
    except DataError as error:
        return str(error)
    return "" if "" in found else "; ".join(found) or "there are no results"


def other_measurement(path: Path, table: Frame, record: Record) -> str:
    """Compare the settings with which a table was measured with those of the run.

    Return a text that names the settings that differ, or "" if all agree.

    Args:
        path: The path of the table.
        table: The table of results.
        record: The record of the run's inputs, which contains the run's settings.
    """
    # Settings without a column in `table` are not compared.
    asked = record.config.get
    wanted = {"distance_scale": asked("eval_distance_scale"), "split": asked("eval_split")}
    wanted |= {"step": asked("train_iters") or None}  # None: the checkpoint of another run
    wanted |= {key: asked(key) for key in SIZES}
    differing = [
        f"{column} {', '.join(map(str, table[column].unique()))} instead of {value}"
        for column, value in wanted.items()
        if value is not None and column in table and not (table[column] == value).all()
    ]
    lengths = asked("eval_lengths")
    if "length" in table and {*map(str, table["length"])} != {*map(str, lengths or ())}:
        differing.append(f"lengths other than {lengths}")
    return f"{path} was measured with {' and '.join(differing)}" if differing else ""


def read_table(path: Path) -> Frame:
    """Return the table in a CSV file.

    Raises:
        DataError: The file cannot be read, or is not a CSV file.
    """
    try:
        return pd.read_csv(io.BytesIO(read_small(path, _MOST_BYTES)))
    except (OSError, ValueError, OverflowError) as error:  # pandas' errors are ValueErrors
        raise DataError(f"{path}: cannot be read ({error})") from None


def share_done(cell: Cell) -> float:
    """Return the share of a cell's training steps that are done, from 0 to 1."""
    record = Record.read(cell.folder)
    steps = record.config.get("train_iters") if record else None
    if not isinstance(steps, int) or steps < 1:
        return 0.0
    row = {"step": 0}
    with suppress(OSError):  # only the estimate of the time left depends on this file
        row = next(RunFolder(cell.folder).metrics_rows(newest_first=True), row)
    return min(1.0, row["step"] / steps)


def write_index(cells: Sequence[Cell], runs: Path) -> pd.DataFrame:
    """Write a table of all runs to `cells.csv` in the folder `runs`, and return the table."""
    # Each row has a run's state, run folder, wall time, machine and versions.
    rows = []
    for cell in cells:
        (state, why), record = state_of(cell), Record.read(cell.folder)
        rows.append(
            {"cell": cell.name, **cell.axes, "seed": cell.seed, "state": state, "why": why,
             "folder": str(cell.folder), "seconds": round(record.seconds, 1) if record else None,
             "host": record.host if record else None,
             "text_fingerprint": record.text if record else None,
             **(record.code if record else {})}
        )  # fmt: skip
    table = pd.DataFrame(rows)
    runs.mkdir(parents=True, exist_ok=True)
    write_text(runs / INDEX, table.to_csv(index=False))
    return table
