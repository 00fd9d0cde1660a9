"""Find the files and checkpoints of a run folder, and read the metrics that the run has logged.

    RUN/config.yml                      the resolved configuration
    RUN/global_stepN/                   a checkpoint (see `engine/checkpoint/saved_checkpoints.py`)
    RUN/latest                          the name of the newest complete checkpoint
    RUN/.lease-N                        names the job that writes the folder (`engine/job/lease.py`)
    RUN/run.json, RUN/log.txt           where the run comes from, and what it has printed
    RUN/metrics.jsonl, RUN/wandb_id     what the run has logged, and its id in wandb
    RUN/extrapolation.csv, .png, .svg   perplexity by length, of text
    RUN/accuracy.csv, .png, .svg        accuracy by length, of a length task
    RUN/kernels.png, .svg, RUN/suite/   the learned kernels, and the use of context

A run folder may also contain checkpoints in the published (GPT-NeoX) layout. This module does not
import torch, so that tools that only read run folders start fast.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.files import parse_json, read_small, read_start

MOST_BYTES = 1 << 34
"""The largest size of a file of a run folder that is read whole, in bytes."""
RECORD = "kerple.json"
"""The file of a checkpoint that describes it. Published (GPT-NeoX) checkpoints lack it."""
TIMES = ("time", "elapsed_seconds")
"""The entries of a row of metrics that say when it was written."""
_TAG = "global_step"


class RunFolder:
    """A folder with the files of a run, or with the results of an evaluation. It may be missing.

    Attributes:
        path: The path of the folder.
        config: The path of `config.yml`. This file and the files below may be missing.
        latest, log, metrics, wandb_id: The paths of `latest`, `log.txt`, `metrics.jsonl` and
            `wandb_id`.
        provenance: The path of `run.json`, which describes where the run comes from.
        extrapolation, accuracy: The paths of the tables `extrapolation.csv` and `accuracy.csv`.
        baselines: The path of `context_baseline.csv`, the perplexity with a short context.
        kernels: The path of `kernels.png`, a picture of the learned kernels.
        suite: The path of the folder into which `evaluate.py --suite` writes.
        results: The paths of both tables by length, `extrapolation` and `accuracy`.
    """

    # The module docstring describes the files. A run has at most one of the tables in `results`.

    def __init__(self, path: Path | str):
        self.path = path = Path(path)
        self.config, self.latest = path / "config.yml", path / "latest"
        self.provenance, self.log = path / "run.json", path / "log.txt"
        self.metrics, self.wandb_id = path / "metrics.jsonl", path / "wandb_id"
        self.extrapolation, self.accuracy = path / "extrapolation.csv", path / "accuracy.csv"
        self.baselines, self.kernels = path / "context_baseline.csv", path / "kernels.png"
        self.suite = path / "suite"
        self.results = self.extrapolation, self.accuracy

    def tags(self, after: int = -1) -> list[str]:
        """Return the names of the complete checkpoints, in the order of their steps.

        Args:
            after: The result has only checkpoints of later steps than this one.
        """
        steps = [path.name[len(_TAG) :] for path in self.path.glob(f"{_TAG}*")]
        numbers = sorted(int(step) for step in steps if step.isdecimal())
        return [tag_of(number) for number in numbers if number > after]

    def newest_tag(self) -> tuple[str | None, str]:
        """Return (name of the newest checkpoint, problem).

        The file `latest` contains the name. If there is a problem or no checkpoint, the name is
        None. The problem is a text for the user, or "" if there is none.
        """
        # There are three problems: `latest` is missing although there are checkpoints, `latest`
        # names a missing checkpoint, or this folder is itself a checkpoint. If the folder has no
        # checkpoints, the result is (None, "").
        if not self.latest.is_file():
            if is_checkpoint(self.path):
                return None, (
                    f"{self.path} is one checkpoint; name the folder that holds it, "
                    f"{self.path.parent}, with a file `latest` in it that contains {self.path.name}"
                )
            if there := self.tags():
                return None, (
                    f"{self.latest} is missing, but {self.path / there[-1]} is there; write "
                    f"{there[-1]} into that file, let train.py --allow-fallback take the newest "
                    "intact checkpoint, or name another `save` to start from step 0"
                )
            return None, ""
        tag = read_start(self.latest).strip()
        if tag not in os.listdir(self.path) or not (self.path / tag).is_dir():
            there = ", ".join(self.tags()) or "none"
            return None, (
                f"{self.latest} names {tag!r}, which is not a checkpoint folder beside it (there: "
                f"{there}); write the name of one of those into it, let train.py --allow-fallback "
                "take the newest intact one, or name another `save` to start from step 0"
            )
        return tag, ""

    def newest_step(self) -> int:
        """Return the step of the checkpoint that the file `latest` names, or 0 if there is none."""
        step = (self.newest_tag()[0] or "").removeprefix(_TAG)
        return int(step) if step.isdecimal() else 0

    def metrics_rows(self, *, newest_first: bool = False) -> Iterator[dict[str, Any]]:
        """Yield the rows of `metrics.jsonl` as dicts with an integer `step`. Skip damaged lines.

        Args:
            newest_first: Whether to yield the rows from the last line to the first.
        """
        # The last line may be incomplete, because a run may be writing the file.
        content = read_small(self.metrics, MOST_BYTES) if self.metrics.is_file() else b""
        lines = content.decode("utf-8", "replace").split("\n")[:-1]
        for line in reversed(lines) if newest_first else lines:
            if row := metrics_row(line):
                yield row


def metrics_row(line: str) -> dict[str, Any] | None:
    """Return the row of metrics in a line of `metrics.jsonl`, or None if the line is damaged."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    whole = type(step) is int and 0 <= step < 1 << 63
    return row if whole and "\ufffd" not in line else None  # the replacement of damaged bytes


def tag_of(step: int) -> str:
    """Return the name of the checkpoint that a run saves after `step` steps."""
    return f"{_TAG}{step}"


def is_checkpoint(folder: Path) -> bool:
    """Return whether the folder is a checkpoint of this project, or a published checkpoint."""
    return (folder / RECORD).is_file() or is_published(folder)


def is_published(checkpoint: Path) -> bool:
    """Return whether a checkpoint folder is in the published (GPT-NeoX) layout."""
    # GPT-NeoX and this project both write such files. Only this project writes `kerple.json`
    # and `rng_rank_*.pt`, so a folder with such a file is not in the published layout.
    ours = (checkpoint / RECORD).exists() or any(checkpoint.glob("rng_rank_*.pt"))
    if ours:  # `kerple.json` may have been lost, and the `rng_rank` files not
        return False
    names = os.listdir(checkpoint) if checkpoint.is_dir() else []
    return any(re.fullmatch(r"(layer_\d+-model|mp_rank)_\d+[_-]model_states\.pt", x) for x in names)
