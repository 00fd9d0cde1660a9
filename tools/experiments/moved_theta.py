"""Measure how far training has moved theta, the learned parameters of the kernels.

A parameter has a start value s_h and an end value e_h for each head h. If layers have parameters of
their own, h counts the heads of all layers. If a parameter is a table, h also counts the entries of
the table. The measures of a parameter are:

    start      mean of s_h
    end        mean of e_h
    change     root of the mean of (e_h - s_h)^2
    relative   change / root of the mean of s_h^2; empty if all s_h are 0

The start values are computed again from the config and the seed, and rounded to the run's
precision. The end values are those of the last logged step, which are not rounded.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.config import ConfigError, Problem, load_config
from megatron.config.command_line import sharing_layout
from megatron.config.errors import Mark
from megatron.run_folder import RunFolder
from tools.experiments.results import Frame

VALUES = ["start", "end", "change", "relative"]
_PREFIX = "theta/"


def of_runs(results: Frame) -> tuple[Frame, list[str]]:
    """Return (table of the moved parameters of all runs, remarks).

    The table has a row for each run and each learned parameter.

    Args:
        results: The results of all runs.
    """
    # There is a remark for each run whose start values cannot be found. `results` comes from
    # `results.of_grid` or `results.of_folders`.
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

    A run that began with the weights of another run has no rows.

    Args:
        folder: The run folder.

    Raises:
        ConfigError: The run's config cannot be loaded, or its parameters differ from the logged
            parameters.
    """
    step, logged = _last_logged(folder)
    start = _start(folder) if logged else {}
    here, there = ({name: np.shape(each) for name, each in x.items()} for x in (start, logged))
    if start and here != there:
        text = f"the run logged {', '.join(there)}, but this embedding has {', '.join(here)}"
        text += f" (shapes: {[*there.values()]} and {[*here.values()]})"
        raise ConfigError([Problem(Mark(str(RunFolder(folder).config)), "pos_emb", text)])
    return [
        {"parameter": name, "step": step, **_moved(start[name], logged[name])} for name in start
    ]


def _moved(start: np.ndarray, end: np.ndarray) -> dict[str, float]:
    change = _rms(end - start)
    relative = change / _rms(start) if start.any() else np.nan
    return {"start": start.mean(), "end": end.mean(), "change": change, "relative": relative}


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _last_logged(folder: Path) -> tuple[int, dict[str, np.ndarray]]:
    """Return the last step at which a run logged learned parameters, and these parameters."""
    # The result is (0, {}) if the run logged none.
    for row in RunFolder(folder).metrics_rows(newest_first=True):
        named = {name.removeprefix(_PREFIX): row[name] for name in row if name.startswith(_PREFIX)}
        with suppress(ValueError, TypeError, OverflowError):  # a damaged row
            lists = {name: values for name, values in named.items() if isinstance(values, list)}
            if logged := {name: np.asarray(x, dtype=float) for name, x in lists.items()}:
                return row["step"], logged
    return 0, {}


def _start(folder: Path) -> dict[str, np.ndarray]:
    """Return the start values of a run's learned parameters, as a dict from name to array.

    The dict is empty if the run began with the weights of another run.
    """
    # These imports take seconds, and runs without learned parameters need none of them.
    from megatron.engine.build import plan_of
    from megatron.engine.model_shape import DTYPES
    from megatron.model.theta import columns_of, initial_theta, named_theta

    config = load_config(
        [RunFolder(folder).config], [*sharing_layout(1), "attention_backend=eager"]
    )
    if config.checkpoint.load not in (None, config.checkpoint.save):
        return {}
    plan = plan_of(config, 1, device_type="cpu", eod=0)
    theta_HN = initial_theta(plan)[:, columns_of(plan.pos, trained=True)]
    rounded_HN = theta_HN.to(DTYPES[config.training.precision]).double()
    return {name: values.numpy() for name, values in named_theta(plan.pos, rounded_HN).items()}
