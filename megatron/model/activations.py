"""Compute the activations of an MLP. Exports contain this file (see `megatron.hub.bundle`)."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Functions = Mapping[str, Callable[[Tensor], Tensor]]
GATES = {
    "geglu": "gelu",
    "swiglu": "swish",
    "reglu": "relu",
    "glu": "sigmoid",
    "bilinear": "identity",
}
"""Maps each gated activation to its function f in f(gate) * value (arXiv 2002.05202)."""


def stepwise_tanh_gelu(x: Tensor) -> Tensor:
    """Return the tanh approximation of gelu, rounded after each operation."""
    # 0.5 x (1 + tanh(0.79788456 x (1 + 0.044715 x^2)))
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def tanh_gelu(x: Tensor) -> Tensor:
    """Return the tanh approximation of gelu."""
    # torch's constant differs in the tenth digit, which only float64 resolves.
    return stepwise_tanh_gelu(x) if x.dtype == torch.float64 else F.gelu(x, approximate="tanh")


ACTIVATIONS: Functions = {
    "gelu": F.gelu,
    "tanh_gelu": tanh_gelu,
    "identity": lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "softsign": F.softsign,
    "swish": F.silu,
    "mish": F.mish,
}


def activate(
    x: Tensor, name: str, *, tanh: bool = False, functions: Functions = ACTIVATIONS
) -> Tensor:
    """Apply the activation `name` to `x`.

    A gated activation (such as `swiglu`) splits the last dimension of `x` into value and gate. The
    last dimension of the result is then half as long.

    Args:
        name: The name of the activation.
        tanh: Whether `gelu` means the tanh approximation of gelu.
        functions: The function of each activation without a gate, by the activation's name.
    """
    if name in GATES:
        value, gate = x.chunk(2, dim=-1)
        return functions[GATES[name]](gate) * value
    return functions["tanh_gelu" if tanh and name == "gelu" else name](x)
