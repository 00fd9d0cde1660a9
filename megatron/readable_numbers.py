"""Format numbers, durations and the time for people, with a useful number of digits."""

import math
from datetime import datetime


def decimals(value: float, digits: int) -> int:
    """Return how many decimals `value` needs to show at least `digits` significant digits."""
    if value == 0 or not math.isfinite(value):
        return 0
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def told_apart(*values: float) -> list[str]:
    """Format numbers so that different numbers have different texts.

    The numbers get three significant digits, or up to six if three are not enough.
    """
    texts: list[str] = []
    for digits in range(3, 7):
        texts = [f"{value:,.{decimals(value, digits)}f}" for value in values]
        # The texts 10.00 and 10.0 look the same, so numbers are compared, not texts.
        if len({float(text.replace(",", "")) for text in texts}) == len(set(values)):
            break
    return texts


def clock(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds, such as 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def now() -> str:
    """Return the local time and its offset from UTC, such as 2026-11-24T06:01:37+01:00."""
    return datetime.now().astimezone().isoformat(timespec="seconds")
