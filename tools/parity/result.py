"""The verdict on one case: the error of each quantity, and the error that is allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Numbers = np.ndarray | np.floating[Any] | float


@dataclass
class Result:
    """The line of one case.

    Attributes:
        name: the case.
        errors: quantity -> (greatest error so far, tolerance).
        faults: what is wrong apart from numbers; one is enough to fail the case.
        unchecked: what could not be checked, and why; it does not fail the case.
        refusal: why the attention backend does not serve this case; then there is no verdict.
    """

    name: str
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    refusal: str | None = None

    def add(self, quantity: str, error: float, tolerance: float) -> None:
        """Keep the greatest error of a quantity; a NaN counts as infinite."""
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
        """Add max |ours - published| / scale."""
        ours, published = np.asarray(ours, np.float64), np.asarray(published, np.float64)
        if ours.shape != published.shape:
            self.faults.append(f"{quantity}: {ours.shape}, published {published.shape}")
            return
        if ours.size:
            self.add(quantity, float(np.max(np.abs(ours - published) / scale)), tolerance)

    def expect(self, what: str, ours: object, published: object) -> None:
        """Add a fault unless the two are equal."""
        if ours != published:
            self.faults.append(f"{what}: {_short(ours)}, published {_short(published)}")

    @property
    def passed(self) -> bool:
        """Whether something was compared and all of it is within its tolerance."""
        if self.faults or not self.errors:
            return False
        return all(error <= tolerance for error, tolerance in self.errors.values())

    def line(self) -> str:
        """`ok    NAME: quantity error (tolerance), ...`"""
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
