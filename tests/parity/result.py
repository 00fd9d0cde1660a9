"""Collect the result of one parity case: the error of each quantity, and its tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Numbers = np.ndarray | np.floating[Any] | float


@dataclass
class Result:
    """The result of one parity case, which is printed as one line.

    Attributes:
        name: The name of the case.
        errors: Maps each quantity to (greatest error so far, tolerance).
        faults: Descriptions of other failures. A single fault fails the case.
        unchecked: What could not be checked, and why. An unchecked part does not fail the case.
        refusal: Why the attention backend does not support this case, or None. A case with a
            refusal counts as neither passed nor failed, unless it also has faults.
    """

    name: str
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    refusal: str | None = None

    def add(self, quantity: str, error: float, tolerance: float) -> None:
        """Record `error` for `quantity` unless a greater one is recorded. NaN counts as inf."""
        error = math.inf if math.isnan(error) else float(error)
        self.errors[quantity] = max(self.errors.get(quantity, (0.0, 0.0))[0], error), tolerance

    def compare(
        self,
        quantity: str,
        ours: Numbers,
        published: Numbers,
        tolerance: float,
        *,
        scale: Numbers = 1.0,
    ) -> None:
        """Record the greatest element of |ours - published| / scale as an error of `quantity`.

        Arrays of different shapes add a fault.
        """
        ours, published = np.asarray(ours, np.float64), np.asarray(published, np.float64)
        if ours.shape != published.shape:
            self.faults.append(f"{quantity}: {ours.shape}, published {published.shape}")
            return
        if ours.size:
            self.add(quantity, float(np.max(np.abs(ours - published) / scale)), tolerance)

    def expect(self, what: str, ours: object, published: object) -> None:
        """Add a fault named `what` unless `ours` equals `published`."""
        if ours != published:
            self.faults.append(f"{what}: {_short(ours)}, published {_short(published)}")

    @property
    def passed(self) -> bool:
        """Whether the case passed.

        A case passes if at least one quantity was compared, every error is within its tolerance,
        and there is no fault.
        """
        if self.faults or not self.errors:
            return False
        return all(error <= tolerance for error, tolerance in self.errors.values())

    def line(self) -> str:
        """Return the line to print, for example `ok    NAME: loss 1e-07 (1e-05), ...`."""
        if self.refusal and not self.faults:
            return f"-     {self.name}: not served: {self.refusal}"
        found = [
            f"{quantity} {error:.2g} ({tolerance:g}){'' if error <= tolerance else ' TOO FAR'}"
            for quantity, (error, tolerance) in self.errors.items()
        ]
        found += self.faults + [f"not checked: {reason}" for reason in self.unchecked]
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.name}: {', '.join(found) or 'nothing'}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
