"""One case's verdict: how far each quantity is from the published one, and how far it may be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Result:
    """The line of one case.

    Attributes:
        name: the case.
        errors: quantity -> (greatest error so far, tolerance).
        faults: what is wrong beyond numbers; any fails the case.
        refusal: why the asked attention backend does not serve this case: then there is no verdict.
    """

    name: str
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    refusal: str | None = None

    def add(self, quantity: str, error: float, tolerance: float) -> None:
        """Keep the greatest error of a quantity; a NaN counts as infinite."""
        error = math.inf if math.isnan(error) else float(error)
        self.errors[quantity] = max(self.errors.get(quantity, (0.0, 0.0))[0], error), tolerance

    def compare(
        self,
        quantity: str,
        ours: np.ndarray | float,
        published: np.ndarray | float,
        tolerance: float,
        *,
        scale: np.ndarray | float = 1.0,
    ) -> None:
        """Add max |ours - published| / scale."""
        ours, published = np.asarray(ours, np.float64), np.asarray(published, np.float64)
        if ours.shape != published.shape:
            self.faults.append(f"{quantity}: {ours.shape}, published {published.shape}")
            return
        if ours.size:
            self.add(quantity, float(np.max(np.abs(ours - published) / scale)), tolerance)

    def expect(self, what: str, ours: object, published: object) -> None:
        """A fault unless the two are equal."""
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
        parts = [
            f"{quantity} {error:.2g} ({tolerance:g}){'' if error <= tolerance else ' TOO FAR'}"
            for quantity, (error, tolerance) in self.errors.items()
        ]
        parts += self.faults
        if self.refusal and not self.faults:
            return f"-     {self.name}: not served: {self.refusal}"
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.name}: {', '.join(parts) or 'nothing'}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
