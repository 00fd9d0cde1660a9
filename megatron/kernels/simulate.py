"""Execute generated device functions in torch, in fp32, so that they can be checked without a GPU.

The same source text is executed as on a GPU, with torch's operations in place of Triton's. `rcp`
multiplies each number by itself, as it multiplies neighbours on a GPU, whose distances are alike.
So overflows, underflows and lost digits show. The errors of fast instructions are not simulated.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.device_functions import DeviceFunctions


class _Row:
    """Stands for a pointer to a row of theta. Adding n to it gives column n."""

    def __init__(self, theta_RN: Tensor):
        self.columns = theta_RN.unbind(1)

    def __add__(self, n: int) -> Tensor:
        return self.columns[n]


def _tensor(x: Any) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float32)


def _flush(x: Any) -> Tensor:
    """Return x with subnormal numbers replaced by 0, as fast instructions do."""
    return torch.where(_tensor(x).abs() < torch.finfo(torch.float32).tiny, 0.0, _tensor(x))


def _same(x: Any) -> Any:
    return x


TL = SimpleNamespace(
    constexpr=None, load=_same, sum=_same, where=torch.where,
    maximum=lambda x, y: torch.maximum(_tensor(x), _tensor(y)),
    log2=lambda x: _tensor(x).log2(), exp2=lambda x: _tensor(x).exp2(),
    sqrt=lambda x: _tensor(x).sqrt(), rsqrt=lambda x: _tensor(x).rsqrt(),
)  # fmt: skip
FUNCTIONS: dict[str, Any] = {
    "tl": TL, "triton": SimpleNamespace(jit=_same), "add_columns": None,
    "lg2": lambda x: _flush(x).log2(), "lg2_or_finite": lambda x: _flush(x).log2().clamp(min=-1e30),
    "ex2": lambda x: _flush(_flush(x).exp2()), "rcp": lambda x: 1 / _flush(x * x) * x,
    "rcp_any": lambda x: _flush(1 / _flush(x)),
    "sine": lambda x: _tensor(x).sin(), "cosine": lambda x: _tensor(x).cos(),
}  # fmt: skip


def simulate(
    functions: DeviceFunctions, theta_RN: Tensor, s_R: Tensor, d_R: Tensor, i_R: Tensor, scale: float
) -> Tensor:
    """Return R logits, each followed by its gradient with respect to theta, [R, 1 + N].

    Row r has numbers of its own: theta, the query-key product s, the distance d, and the query's
    position i. The device functions have no layer of hidden units.
    """
    scope = dict(FUNCTIONS)
    exec(functions.source, scope)
    constants = scope["prepare"](_Row(theta_RN), 0, scale)
    y, _, *terms = scope["evaluate"](s_R, d_R, 0.0, None, constants, i_R)
    count = functions.num_theta
    gradients = scope["finish"]([*terms, *[0.0] * count], torch.zeros(1), constants)[:count]
    columns = [scale * y, *gradients]
    return torch.stack([(0.0 * s_R + column).view(-1) for column in columns], dim=1)
