"""Define `Case`, the input of a check of `tools/doctor.py`, and `Finding`, the result."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check of the machine or the job.

    Attributes:
        level: The severity: `ok`, `warning` or `problem`.
        text: What the check found, in one line.
        remedy: One line that tells the user how to solve the problem; "" if `level` is `ok`.
    """

    level: str
    text: str
    remedy: str = ""


def judged(bad: object, text: str, remedy: str, level: str = PROBLEM) -> Finding:
    """Return a finding of severity `level` if `bad` is true, otherwise a finding of severity `ok`.

    Args:
        bad: Whether the check found a problem.
        text: What the check found.
        remedy: One line that tells the user how to solve the problem.
        level: The severity of the problem, `warning` or `problem`.
    """
    return Finding(level, text, remedy) if bad else Finding(OK, text)


@dataclass(frozen=True)
class Case:
    """The run and the job that the checks examine.

    Attributes:
        config: The `Config` of the planned run, or None.
        folder: The run folder, which the config key `save` names. The folder need not exist.
        gpu: Whether torch sees a CUDA GPU.
        ranks: The number of processes of the job. Without a launcher, it is the number of processes
            that train.py would start.
        several: Whether the job has more than one machine.
    """

    config: Any
    folder: Path
    gpu: bool
    ranks: int = 1
    several: bool = False
