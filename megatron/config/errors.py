"""Define the problems of a config, and the error that reports all of them.

A problem is printed as one line: `file:line: key: what is wrong; what to write instead`. All
problems of a config are collected and raised together in one `ConfigError`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.errors import UserError


@dataclass(frozen=True)
class Mark:
    """The place where a setting is written: a file and a line, or an override.

    Attributes:
        file: The path of a config file, or the text of an override (`-o key=value`).
        line: The line in the file, counted from 1; None for an override.
    """

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One problem of a config.

    Attributes:
        mark: The place of the setting, or None if the problem has no place (such as a missing key).
        key: The dotted key, such as `optimizer.params.lr`, or "" if the problem concerns no key.
        text: The message, which names the mistake and the remedy.
    """

    mark: Mark | None
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(str(part) for part in (self.mark, self.key, self.text) if part)


class ConfigError(UserError):
    """The error that lists all problems of a config.

    `str(error)` is the number of problems, followed by one line for each problem.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        return "\n".join([f"{head} in the configuration:", *map(str, self.problems)])
