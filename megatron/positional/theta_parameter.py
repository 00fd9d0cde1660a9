"""Describe one column of theta, the parameters of an embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ThetaParameter:
    """One column of theta: a parameter of an embedding, with one number for each head.

    Attributes:
        name: The column's name in checkpoints of the released KERPLE code (`bias_p`, `wei_a`, ...).
        low, high: The smallest and the largest allowed value, or infinite for no bound. Theta is
            clamped to these bounds after each optimizer step.
        scale: Initial values are drawn as `scale * U(0, 1)` and clamped to the bounds.
        trained: Whether training changes the column.
        shared: Whether all heads have the same number. The model then stores and logs it once.
        gentle: The initial value in a model that was first trained without this column. This value
            changes the model little, but has a gradient from the first step on. None means the
            initial value of a new model.
    """

    name: str
    low: float = -torch.inf
    high: float = torch.inf
    scale: float = 1.0
    trained: bool = True
    shared: bool = False
    gentle: float | None = None


def factor(name: str, gentle: float | None = None) -> ThetaParameter:
    """Return a column of theta: a coefficient >= 0.01, drawn from U(0, 1) at the start."""
    return ThetaParameter(name, low=0.01, gentle=gentle)


def power(name: str, gentle: float | None = None) -> ThetaParameter:
    """Return a column of theta: an exponent in [0.01, 2], drawn from 2 U(0, 1) at the start."""
    return ThetaParameter(name, low=0.01, high=2.0, scale=2.0, gentle=gentle)
