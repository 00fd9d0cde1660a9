"""Define the rules by which a model rounds numbers. A run uses one of two sets of rules.

With `WIDE`, the default, positional embeddings, norms and softmax are computed at least in fp32.
With `PublishedNumerics` (config key `published_numerics`), numbers are rounded where the released
KERPLE code rounds them. These rules reproduce the results of that code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Numerics:
    """The rules by which a model rounds numbers.

    The rules of this base class compute positional embeddings, norms and softmax at least in fp32.

    Attributes:
        published: Whether values are rounded where the released KERPLE code rounds them.
    """

    published = False

    @property
    def projects_master(self) -> bool:
        """Whether the fp32 master copy of the positional parameters is clamped to their bounds."""
        # The optimizer updates this copy, called the master. The model's 16-bit copy is always
        # clamped.
        return True

    def working_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which to compute with inputs of `dtype`."""
        return torch.promote_types(dtype, torch.float32)

    def constant(self, value: Tensor) -> Tensor:
        """Return a tensor of constants, such as slopes or frequencies, rounded by these rules.

        The dtype of the tensor stays the same.
        """
        # Only `PublishedNumerics` rounds constants. Other rules return `value` unchanged.
        return value

    def log1p(self, x: Tensor) -> Tensor:
        """Return log(1 + x)."""
        return torch.log1p(x)


@dataclass(frozen=True)
class PublishedNumerics(Numerics):
    """The rounding rules of the released KERPLE code: round to `dtype` after each operation.

    Attributes:
        dtype: The dtype in which the run trains: bf16, fp16 or fp32.
    """

    dtype: torch.dtype
    published = True

    @property
    def projects_master(self) -> bool:
        return self.dtype == torch.float32

    def working_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def constant(self, value: Tensor) -> Tensor:
        return value.to(self.dtype).to(value)

    def log1p(self, x: Tensor) -> Tensor:
        return torch.log(1 + x)  # 1 + x is rounded before the logarithm


WIDE = Numerics()


def in_floating_point(formula: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return a method that calls `formula` with floating-point distances and positions.

    The new method first converts the distances and positions to theta's dtype or to fp32, whichever
    is wider. Then it calls `formula`.

    Args:
        formula: A method of a positional embedding. Its arguments are theta (the learned
            parameters), the distances and, in some embeddings, the positions of the queries.
    """

    # A formula that uses `d` itself, and not what `columns` returns, would else compute with whole
    # numbers.
    @wraps(formula)
    def computed(self: Any, theta_HN: Tensor, *d_and_i: Tensor) -> Tensor | None:
        dtype = torch.promote_types(theta_HN.dtype, torch.float32)
        return formula(self, theta_HN, *(x.to(dtype) for x in d_and_i))

    return computed
