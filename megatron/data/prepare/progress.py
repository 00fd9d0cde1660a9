"""Show the progress of a long preparation run, and describe skipped records."""

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LISTED = 10
"""The largest number of skipped records or inputs that are printed."""


@contextmanager
def progress_bar(total: int, label: str) -> Iterator[Callable[[int], None]]:
    """Provide a function that updates a progress bar on stderr during the `with` block.

    The argument of the function is the number of bytes of the inputs that have been processed. The
    bar appears at the first call. It shows the bytes so far, the bytes per second, and the time
    left.

    Args:
        total: The number of bytes of all inputs, or 0 if the number is unknown.
        label: The text before the bar.
    """
    bar = None

    def show(read: int) -> None:
        nonlocal bar
        read = max(0, min(read, total or read))
        if bar is None:
            from tqdm import tqdm  # imported here, after the workers were started

            # A log file gets a line every 15 seconds instead of five per second.
            interval = 0.2 if sys.stderr.isatty() else 15.0
            form = "{desc} |{bar}| {n_fmt}B/{total_fmt}B | {rate_fmt} | ETA {remaining}"
            bar = tqdm(
                total=total or None, desc=label, unit="B", unit_scale=True,
                mininterval=interval, smoothing=0.1, initial=read,
                bar_format=form if total else None,
            )  # fmt: skip
        bar.update(max(0, read - bar.n))

    try:
        yield show
        if bar is not None and total:
            show(total)
    finally:
        if bar is not None:  # a bar without total has no truth value
            bar.close()


def describe_skipped(path: str | os.PathLike, faults: int) -> str:
    """Return a text with the number of skipped records and a list of the first few.

    Args:
        path: The file that lists all skipped records, one per line.
        faults: The number of skipped records.
    """
    with open(path, encoding="utf-8") as file:
        shown = "".join(f"  {line}" for line in itertools.islice(file, LISTED))
    more = "  ..." if faults > LISTED else ""
    return f"skipped {faults} faulty records, listed in {path}:\n{shown}{more}"


def printable(fault: str) -> str:
    """Return `fault` with line feeds and control codes escaped."""
    # The name of a file inside an archive may contain such characters.
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in fault)
