"""Execute generated device functions in torch, in fp32, so that they can be checked without a GPU.

The code is the same as on a GPU, but with torch's operations in place of Triton's. On a GPU, `rcp`
multiplies two neighbouring numbers of a tile, whose distances hardly differ. Here, `rcp` multiplies
each number by itself. Therefore overflows, underflows and lost digits also occur here. The errors
of fast instructions are not simulated.
"""

from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.device_functions import DeviceFunctions


def fp32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that converts its arguments to fp32 tensors and calls `function`.

    Subnormal numbers in arguments and results become 0, as in a GPU's fast instructions.
    """

    def flush(x: Any) -> Tensor:
        x = torch.as_tensor(x, dtype=torch.float32)
        return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x)

    return lambda *inputs: flush(function(*map(flush, inputs)))


INSTRUCTIONS: dict[str, Any] = {
    "lg2": fp32(torch.log2), "lg2_or_finite": fp32(lambda x: x.log2().clamp(min=-1e30)),
    "ex2": fp32(torch.exp2), "sine": fp32(torch.sin), "cosine": fp32(torch.cos),
    "rcp": fp32(lambda x: fp32(torch.reciprocal)(x * x) * x), "rcp_any": fp32(torch.reciprocal),
}  # fmt: skip
NAMES = ("log2", "exp2", "sqrt", "rsqrt", "maximum", "abs")


def simulate(functions: DeviceFunctions, inputs: tuple[Tensor, ...], scale: float) -> Tensor:
    """Compute logits and their gradients in torch, as a GPU would.

    The result has one row for each sample: the logit, then its gradient for each parameter.

    Args:
        functions: The device functions that compute the positional embedding.
        inputs: The R samples: N parameters [R, N], query-key products [R], distances [R], and
            positions of the queries [R].
        scale: The number that multiplies the query-key products.
    """
    theta_RN, s_R, d_R, i_R = (x.float() for x in inputs)
    tl = SimpleNamespace(load=theta_RN.unbind(1).__getitem__, sum=lambda x: x, where=torch.where)
    vars(tl).update({name: fp32(getattr(torch, name)) for name in NAMES})
    prepare, evaluate, finish = (
        FunctionType(each.fn.__code__, INSTRUCTIONS | {"tl": tl, "float": float})
        for each in (functions.prepare, functions.evaluate, functions.finish)
    )
    constants = prepare(0, 0, scale)
    y, _, *terms = evaluate(s_R, d_R, 0.0, None, constants, i_R)
    gradients = finish([*terms, *[0.0] * len(terms)], torch.zeros(1), constants)
    return torch.stack([(0.0 * s_R + x).view(-1) for x in (scale * y, *gradients)], dim=1)
