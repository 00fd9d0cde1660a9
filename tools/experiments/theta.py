"""Tell how far training has moved theta, the learned parameters of the kernels.

For each parameter, with start values s_h and end values e_h of the heads h (of all layers that have
their own, and of all buckets of a table):

    start     mean of s_h             change     root of the mean of (e_h - s_h)^2
    end       mean of e_h             relative   change / root of the mean of s_h^2; empty for 0

The start values are drawn again from the configuration and the seed, and rounded to the run's
precision. The end values are those of the last logged step, before any rounding.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.config import ConfigError, load_config
from megatron.config.command_line import sharing_layout
from megatron.files import parse_json
from tools.experiments.results import Frame

VALUES = ["start", "end", "change", "relative"]
_PREFIX = "theta/"
_LAYER = re.compile(r"^layers\.\d+\.")


def of_runs(results: Frame) -> tuple[Frame, list[str]]:
    """Return a row for each run and learned parameter, and a remark on each run that has none.

    Args:
        results: the table of `results.of_grid` or `results.of_folders`.
    """
    runs = results.drop(columns=["length", "metric", "value"]).drop_duplicates()
    found, remarks = [], []
    for run in runs.to_dict("records"):
        try:
            rows = of_run(Path(run["folder"]))
        except ConfigError as error:
            remarks.append(f"{run['cell']}: theta's start is unknown: {error}")
            continue
        found += [run | row for row in rows]
    return pd.DataFrame(found, columns=[*runs, "parameter", "step", *VALUES]), remarks


def of_run(folder: Path) -> list[dict[str, Any]]:
    """Return a row for each parameter that a run has trained and logged.

    A run that began with the weights of another one has no rows, because its start is not drawn.

    Raises:
        ConfigError: the run's configuration cannot be loaded.
    """
    step, logged = _last_logged(folder / "metrics.jsonl")
    rows = []
    for name, start in (_start(folder, list(logged)) if logged else {}).items():
        end = np.asarray(logged[name], dtype=float)
        change = _rms(end - start)
        rows.append(
            {"parameter": name, "step": step, "start": start.mean(), "end": end.mean(),
             "change": change, "relative": change / _rms(start) if start.any() else np.nan}
        )  # fmt: skip
    return rows


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _last_logged(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the last step with theta in a metrics file, and its value of each parameter."""
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
    for line in reversed(whole.splitlines()):
        row = parse_json(line)
        lists = {name: value for name, value in row.items() if isinstance(value, list)}
        logged = {n.removeprefix(_PREFIX): v for n, v in lists.items() if n.startswith(_PREFIX)}
        if logged:
            return row["step"], logged
    return 0, {}


def _start(folder: Path, logged: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the start values of the parameters in `logged`, each in the shape of the log."""
    # These imports take seconds, and runs without learned parameters need none of them.
    from megatron.engine.build import plan_of
    from megatron.engine.shape import DTYPES
    from megatron.model.embedding import initial_theta

    config = load_config([folder / "config.yml"], [*sharing_layout(1), "attention_backend=eager"])
    if config.checkpoint.load not in (None, config.checkpoint.save):
        return {}
    plan = plan_of(config, 1, device_type="cpu", eod=0)
    dtype = DTYPES[config.training.precision]
    theta_HN = initial_theta(plan).to(dtype).double().numpy()
    trained = [(n, p) for n, p in enumerate(plan.pos.parameters) if p.trained]
    if {"table", "shared"} & set(logged):
        own, shared = ([n for n, p in trained if p.shared == each] for each in (False, True))
        found = {"table": theta_HN[:, own], "shared": theta_HN[0, shared]}
    else:
        columns: dict[str, list[np.ndarray]] = {}
        for n, parameter in trained:
            values = theta_HN[:1, n] if parameter.shared else theta_HN[:, n]
            columns.setdefault(_LAYER.sub("", parameter.name), []).append(values)
        several = {name: np.stack(each) for name, each in columns.items()}
        found = {name: each[0] if len(each) == 1 else each for name, each in several.items()}
    return {name: values for name, values in found.items() if name in logged}
