"""Keep the parameters theta of positional embeddings within their bounds.

Legend: H heads, N columns of theta.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.positional.theta_parameter import ThetaParameter


def bounds(parameters: Sequence[ThetaParameter]) -> tuple[Tensor, Tensor]:
    """Return the lower and upper bounds of an embedding's parameters, each fp32 [parameters]."""
    low_N = torch.tensor([p.low for p in parameters], dtype=torch.float32)
    high_N = torch.tensor([p.high for p in parameters], dtype=torch.float32)
    return low_N, high_N


def within_bounds(theta_HN: Tensor, parameters: Sequence[ThetaParameter]) -> Tensor:
    """Return an embedding's parameters, each clamped to its bounds, in their own dtype.

    Args:
        theta_HN: The values [heads, parameters].
        parameters: The descriptions of the parameters.

    Raises:
        TypeError: `theta_HN` is not a tensor, or `parameters` is not a sequence.
    """
    if not (isinstance(theta_HN, Tensor) and isinstance(parameters, Sequence)):
        given = f"{type(theta_HN).__name__}, {type(parameters).__name__}"
        raise TypeError(f"write within_bounds(theta, pos.parameters), not within_bounds({given})")
    pairs = zip(theta_HN.unbind(1), parameters, strict=True)
    columns = [column.clamp(p.low, p.high) for column, p in pairs]
    return torch.stack(columns, dim=1) if columns else theta_HN.clone()
