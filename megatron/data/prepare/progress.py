"""Show the progress of a long preparation run, and describe skipped records."""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

_LISTED = 10  # the largest number of skipped records or inputs that are printed


class ProgressBar:
    """A progress bar on stderr, with the time left and the speed.

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

    def show(self, read: int, counts: dict[str, int]) -> None:
        """Update the bar.

        Args:
            read: The number of bytes of the inputs that have been processed.
            counts: The totals of `documents` and `text_bytes` so far, also from an interrupted run.
        """
        read = max(0, min(read, self._total or read))
        now, documents, text = time.monotonic(), counts["documents"], counts["text_bytes"]
        if self._bar is None:  # a bar without total has no truth value
            from tqdm import tqdm  # imported here, after the workers were started

            # A log file gets a line every 15 seconds instead of five per second.
            interval = 0.2 if sys.stderr.isatty() else 15.0
            self._bar = tqdm(
                total=self._total or None, desc=self._label, unit="B", unit_scale=True,
                mininterval=interval, smoothing=0.1, initial=read,
            )  # fmt: skip
            self._begun = now, documents, text  # a resumed run's rates count its own work only
        begun, documents_then, text_then = self._begun
        if documents > documents_then:
            seconds = max(now - begun, 1e-9)
            rate = f"{(documents - documents_then) / seconds:,.0f} documents/s"
            text_rate = f"{(text - text_then) / seconds / 1e6:.1f} MB/s of text"
            self._bar.set_postfix_str(f"{rate}, {text_rate}", refresh=False)
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
