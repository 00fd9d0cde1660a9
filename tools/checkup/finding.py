"""Define what the doctor's checks examine (`Case`), and what they report (`Finding`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check of the machine or the job.

    Attributes:
        level: `ok`, `warning` or `problem`.
        remedy: One line that says how to solve the problem; "" if `level` is `ok`.
    """

    level: str
    text: str
    remedy: str = ""


def judged(bad: object, text: str, remedy: str, level: str = PROBLEM) -> Finding:
    """Return a finding of `level` if `bad` is true, otherwise a finding that all is well."""
    return Finding(level, text, remedy) if bad else Finding(OK, text)


@dataclass(frozen=True)
class Case:
    """The run and the job that the checks examine.

    Attributes:
        config: The `Config` of the run that is planned, or None.
        folder: The run folder `save`, which need not exist.
        gpu: Whether torch sees a CUDA GPU.
        ranks: The number of processes that the launcher started; 1 without a launcher.
        several: Whether the job has more than one machine.
    """

    config: Any
    folder: Path
    gpu: bool
    ranks: int = 1
    several: bool = False
