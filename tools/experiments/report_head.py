"""Write the head of a report: title, question, methods, and the origin of the runs."""

import itertools
import shlex
from collections.abc import Sequence
from contextlib import suppress

from megatron.config.reader import read_file
from megatron.files import parse_json, read_small
from megatron.readable_numbers import now
from megatron.run_folder import MOST_BYTES, RunFolder
from megatron.version import fingerprint
from tools.experiments.grid import Grid
from tools.experiments.results import Frame


def head_of(found: Frame, grid: Grid | None, arguments: Sequence[str]) -> dict[str, str]:
    """Return the head of a report as a dict of texts, which describe the runs.

    Args:
        found: The table of the results of all runs.
        grid: The grid of the runs; None for single run folders.
        arguments: The command line of `tools/table.py`.

    Returns:
        A dict with these texts. `title` and `question`: the title and the question of the report.
        `methods`: how the models were trained, and how they are compared. `models`: the models, the
        data and the date, for the titles of pictures. `rebuild`: the commands that make the report
        again. `origin`: the commits and machines of the runs, and the code that wrote the report.
    """
    runs = [RunFolder(folder) for folder in found["folder"].unique()]
    configs, starts = [read_file(run.config)[0] for run in runs], _starts(runs)

    def of(key: str) -> str:
        values = [config[(key,)].value for config in configs if (key,) in config]
        texts = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
        return " or ".join(dict.fromkeys(texts)) or "?"

    times, commits, ranks = zip(*starts, strict=True) if starts else ((), (), ())
    date = " to ".join(sorted({time[:10] for time in times})) or now()[:10]
    models, seeds = f"{of('num_layers')} layers of width {of('hidden_size')}", found["seed"]
    methods = (
        f"{len(runs)} models with {models} were trained for {of('train_iters')} steps of "
        f"{of('train_batch_size')} sequences of {of('seq_length')} tokens on {of('data_path')}, "
        f"with {seeds.nunique()} seeds ({seeds.min()} to {seeds.max()}). They are measured on the "
        f"{of('eval_split')} split"
    )
    train = [["train.py", str(run.config)] for run in runs]
    if grid:
        pairs = zip(arguments, arguments[1:], strict=False)
        sets = [text for pair in pairs if pair[0] == "--set" for text in pair]
        sets += [text for text in arguments if text.startswith("--set=")]
        train = [["tools/sweep.py", str(grid.path), *sets]]
        methods += (
            "; a claim is tested over the seeds by paired t tests at a level of "
            f"{grid.about.alpha:g}, after Holm's correction for all claims"
        )
    commands = [*train, ["tools/table.py", *arguments]]
    commit = ", ".join(dict.fromkeys(text[:12] for text in commits)) or "unknown"
    machines = ", ".join(dict.fromkeys(itertools.chain(*ranks))) or "unknown"
    return {
        "title": (grid.about.title or grid.path.stem) if grid else "Runs",
        "question": grid.about.question if grid else "",
        "methods": f"{methods}.",
        "models": f"{models}, {of('data_path')}, trained at {of('seq_length')} tokens, {date}",
        "rebuild": "\n".join(shlex.join(["python", *each]) for each in commands),
        "origin": f"The runs: {date}, commit {commit} on {machines}. This page: {now()[:10]}, code "
        f"{fingerprint()}.",
    }


def _starts(runs: Sequence[RunFolder]) -> list[tuple[str, str, list[str]]]:
    """Return (time, commit, ranks) of the last start of each run whose `run.json` can be read."""
    found = []
    for run in runs:
        with suppress(OSError, ValueError, LookupError, TypeError):
            start = parse_json(read_small(run.provenance, MOST_BYTES))["starts"][-1]
            found.append((str(start["time"]), str(start["code"]["commit"]), [*start["ranks"]]))
    return found
