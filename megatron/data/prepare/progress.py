"""Show the progress of a long preparation run, and describe skipped records."""

from __future__ import annotations

import itertools
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

_LISTED = 10  # the largest number of skipped records or inputs that are printed


class ProgressBar:
    """A progress bar on stderr, which appears at the first call of `show`.

    The bar shows what has been read, the bytes read per second, and the time left.

    Args:
        total: The number of bytes of all inputs, or 0 if it is unknown.
        label: The text before the bar.
    """

    # The bar appears at the first call of `show`. It shows documents per second and megabytes of
    # text per second.

    def __init__(self, total: int, label: str) -> None:
        self._total, self._label = total, label
        self._bar: tqdm | None = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, exc_type: type | None, *_: object) -> None:
        if self._bar is not None:
            if exc_type is None and self._total:
                self._bar.update(self._total - self._bar.n)
            self._bar.close()

    def show(self, read: int) -> None:
        """Update the bar: `read` bytes of the inputs have been processed."""
        read = max(0, min(read, self._total or read))
        if self._bar is None:  # a bar without total has no truth value
            from tqdm import tqdm  # imported here, after the workers were started

            # A log file gets a line every 15 seconds instead of five per second.
            interval = 0.2 if sys.stderr.isatty() else 15.0
            form = "{desc} |{bar}| {n_fmt}B/{total_fmt}B | {rate_fmt} | ETA {remaining}"
            self._bar = tqdm(
                total=self._total or None, desc=self._label, unit="B", unit_scale=True,
                mininterval=interval, smoothing=0.1, initial=read,
                bar_format=form if self._total else None,
            )  # fmt: skip
        self._bar.update(max(0, read - self._bar.n))


def describe_nothing(inputs: list[str], causes: dict[str, int]) -> str:
    """Return the error message for inputs that contain no document with text.

    Args:
        causes: Maps each reason, such as "without text", to the number of records left out.
    """
    lost = ", ".join(f"{count:,} {cause}" for cause, count in causes.items() if count)
    shown = ", ".join(inputs[:_LISTED]) + (", ..." if len(inputs) > _LISTED else "")
    return f"{shown}: no document with text in it{f' ({lost})' if lost else ''}"


def describe_skipped(path: str | os.PathLike, faults: int) -> str:
    """Return a text with the number of skipped records and a list of the first few.

    Args:
        path: The file that lists all skipped records, one per line.
        faults: The number of skipped records.
    """
    with open(path, encoding="utf-8") as file:
        shown = "".join(f"  {line}" for line in itertools.islice(file, _LISTED))
    more = "  ..." if faults > _LISTED else ""
    return f"skipped {faults} faulty records, listed in {path}:\n{shown}{more}"


def printable(fault: str) -> str:
    """Return `fault` with line feeds and control codes escaped."""
    # The name of a file inside an archive may contain such characters.
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in fault)
