"""Let second derivatives of an attention backend raise an error instead of being silently zero.

Exported models contain a copy of this file (see `megatron.hub.bundle`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _NoSecondDerivative(torch.autograd.Function):
    """Autograd function that computes gradients, and raises an error if they are differentiated."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], tuple], *tensors: Tensor | None) -> tuple:
        return run()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "this attention backend has no second derivative: use the backend eager"
        )


def first_order(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorate a backward pass so that second derivatives raise an error."""

    # torch's `once_differentiable` raises no error if the output's gradient needs no gradient
    def marked(ctx: Any, *grads: Tensor | None) -> tuple:
        if not torch.is_grad_enabled():  # the usual case, without create_graph
            return backward(ctx, *grads)
        return _NoSecondDerivative.apply(lambda: backward(ctx, *grads), *grads, *ctx.saved_tensors)

    return marked
