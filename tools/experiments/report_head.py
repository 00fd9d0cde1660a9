"""Describe the runs of a report: the title, the question, the methods, and where they ran."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.reader import read_file
from megatron.files import parse_json, read_small
from megatron.readable_numbers import now
from megatron.run_folder import MOST_BYTES, RunFolder
from megatron.version import fingerprint
from tools.experiments.grid import Grid
from tools.experiments.results import Frame


@dataclass(frozen=True)
class Head:
    """What a report says about its runs.

    Attributes:
        methods: Two sentences: how the models were trained, and how they are compared.
        models: The models, the data and the date, for the titles of pictures.
        rebuild: The commands that make the report again.
        origin: The commits and machines of the runs, and the code that wrote the report.
    """

    title: str
    question: str
    methods: str
    models: str
    rebuild: str
    origin: str


def head_of(found: Frame, grid: Grid | None, arguments: Sequence[str]) -> Head:
    """Describe the runs of a table of results.

    Args:
        found: The table that `results.of_grid` or `results.of_folders` returns.
        arguments: The command line of `tools/table.py`.
    """
    folders = [Path(folder) for folder in found["folder"].unique()]
    configs, starts = [_settings(folder) for folder in folders], [_start(each) for each in folders]

    def of(key: str) -> str:
        return " or ".join(dict.fromkeys(_text(each.get(key)) for each in configs))

    dates = sorted(start["time"][:10] for start in starts if start)
    date = " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])) or now()[:10]
    models = f"{of('num_layers')} layers of width {of('hidden_size')}"
    seeds = sorted(found["seed"].unique())
    methods = (
        f"{len(folders)} models with {models} were trained for {of('train_iters')} steps of "
        f"{of('train_batch_size')} sequences of {of('seq_length')} tokens on {of('data_path')}, "
        f"with {len(seeds)} seeds ({seeds[0]} to {seeds[-1]}). They are measured on the "
        f"{of('eval_split')} split"
    )
    if grid and grid.about.endpoints:
        methods += (
            "; a claim is tested over the seeds by paired t tests at a level of "
            f"{grid.about.alpha:g}, after Holm's correction for all claims"
        )
    pairs = zip(arguments, arguments[1:], strict=False)
    sets = [text for pair in pairs if pair[0] == "--set" for text in pair]
    train = [["train.py", str(RunFolder(folder).config)] for folder in folders]
    if grid:
        train = [["tools/sweep.py", str(grid.path), *sets]]
    commands = [*train, ["tools/table.py", *arguments]]
    commits = dict.fromkeys(str(start["code"]["commit"])[:12] for start in starts if start)
    machines = dict.fromkeys(rank for start in starts if start for rank in start["ranks"])
    ran = f"commit {', '.join(commits)} on {', '.join(machines)}" if commits else "no run.json"
    return Head(
        title=(grid.about.title or grid.path.stem) if grid else "Runs",
        question=grid.about.question if grid else "",
        methods=f"{methods}.",
        models=f"{models}, {of('data_path')}, trained at {of('seq_length')} tokens, {date}",
        rebuild="\n".join(shlex.join(["python", *each]) for each in commands),
        origin=f"The runs: {date}, {ran}. This page: {now()[:10]}, code {fingerprint()}, Python "
        f"{platform.python_version()}.",
    )


def _settings(folder: Path) -> dict[str, Any]:
    settings, _ = read_file(RunFolder(folder).config)
    return {path[0]: given.value for path, given in settings.items()}


def _start(folder: Path) -> dict[str, Any] | None:
    """Return the last start that a run's `run.json` records, or None if it records none."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return parse_json(read_small(RunFolder(folder).provenance, MOST_BYTES))["starts"][-1]
    return None


def _text(value: Any) -> str:
    return (
        f"{value:,}"
        if isinstance(value, int)
        else value
        if isinstance(value, str)
        else json.dumps(value)
    )
