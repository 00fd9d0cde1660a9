"""Describe one column of theta, the parameters of an embedding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.errors import UserError


class PositionalError(UserError, ValueError):
    """An embedding or an option is unknown or invalid. The error message lists the known names."""


@dataclass(frozen=True)
class ThetaParameter:
    """One parameter of a positional embedding, which has a value for each head.

    Attributes:
        name: The parameter's name in checkpoints of the released KERPLE code (`bias_p`, `wei_a`,
            ...).
        low, high: The smallest and the largest allowed value, or infinite for no bound. After each
            optimizer step, the parameter is clamped to these bounds.
        scale: Initial values are drawn as `scale * U(0, 1)` and clamped to the bounds.
        trained: Whether training changes the parameter.
        shared: Whether all heads have the same value.
        gentle: The start value if the parameter is added to a trained model. This value changes the
            model little. None means the initial value of a new model.

    Raises:
        PositionalError: `low` is greater than `high`.
    """

    name: str
    low: float = -torch.inf
    high: float = torch.inf
    scale: float = 1.0
    trained: bool = True
    shared: bool = False
    # It has a gradient from the first step on.
    gentle: float | None = None

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            given = f"low={self.low:g}, high={self.high:g}"
            raise PositionalError(f"{self.name}: low must not be greater than high: {given}")


def factor(name: str, gentle: float | None = None) -> ThetaParameter:
    """Return the description of a coefficient >= 0.01, drawn from U(0, 1) at the start."""
    return ThetaParameter(name, low=0.01, gentle=gentle)


def power(name: str, gentle: float | None = None) -> ThetaParameter:
    """Return the description of an exponent in [0.01, 2], drawn from 2 U(0, 1) at the start."""
    return ThetaParameter(name, low=0.01, high=2.0, scale=2.0, gentle=gentle)


def check_parameters(owner: str, given: Any) -> None:
    """Check the attribute `parameters` of an embedding class.

    Args:
        owner: The name of the class.
        given: The value of the attribute.

    Raises:
        PositionalError: `given` is not a tuple or list of `ThetaParameter` with different names.
    """
    listed = isinstance(given, Sequence) and all(isinstance(p, ThetaParameter) for p in given)
    if not listed or len({p.name for p in given}) < len(given):
        raise PositionalError(
            f"{owner}: write parameters = (ThetaParameter('a', low=0.0), ...), each with a name of "
            f"its own, not {given!r}"
        )
