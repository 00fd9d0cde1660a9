"""Define attention backends. A backend computes attention for a `Call`, and may refuse requests.

Legend: see `choice`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron.attention.call import Call
from megatron.positional import PositionalEmbedding

F = TypeVar("F", bound=Callable)


@dataclass(frozen=True)
class Request:
    """The conditions under which a backend is requested.

    Attributes:
        pos: The positional embedding.
        device_type: "cpu" or "cuda".
        dtype: The dtype of q, k and v.
        training: Whether gradients are needed.
        dropout: Whether dropout is applied to the softmax weights.
        head_size: The head size E, or None if E is not known.
        masked: Whether there are documents or a window, so that a query does not see all keys
            before it.
        decays: Whether a decay is added to the logits, as by a forget gate.
    """

    pos: PositionalEmbedding
    device_type: str
    dtype: torch.dtype
    training: bool = True
    dropout: bool = False
    head_size: int | None = None
    masked: bool = False
    decays: bool = False


@dataclass(frozen=True)
class Backend:
    """One implementation of attention.

    Attributes:
        name: The name, as in the config key `attention_backend`.
        function: Computes the output [batch, heads, queries, head size] of a `Call` that
            `call.lowered` has returned. In such a call, the last key is at the last query's
            position, and `pos` is a distance kernel or has no effect (see `tempers`).
        refusal: Returns why the backend does not serve a request, or None if it serves the request.
        remark: Returns a text for the log about a served request. The text may be empty.
        grouped: Whether k and v may have fewer heads than q.
        tempers: Returns whether the backend multiplies the scores by the embedding's temperature.
            If so, `pos` contains the temperature.
    """

    name: str
    function: Callable[[Call], Tensor]
    refusal: Callable[[Request], str | None] = lambda request: None
    remark: Callable[[Request], str] = lambda request: ""
    grouped: bool = False
    tempers: Callable[[PositionalEmbedding], bool] = lambda pos: False


def weighted(pos: PositionalEmbedding) -> bool:
    """Return whether the embedding multiplies the query-key products by a factor."""
    if not pos.has("distance"):
        return False
    return pos.weight(torch.ones(1, len(pos.parameters)), torch.arange(2)) is not None


def constant(function: F) -> F:
    """Decorate a function so that `torch.compile` treats the function's result as a constant.

    The function runs once, at compile time. `torch.compiler.assume_constant_result` does the same,
    but takes a second to import the compiler.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


class _NoSecondDerivative(torch.autograd.Function):
    """Makes second derivatives raise an error instead of being zero.

    `apply(run, *tensors)` returns the gradients that `run()` computes. Autograd treats them as
    functions of `tensors`, so differentiating them again raises an error.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[], tuple], *tensors: Tensor | None) -> tuple:
        return run()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "this attention backend has no second derivative: use attention_backend eager"
        )


def first_order(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorate an autograd function's backward pass, so that second derivatives raise an error.

    torch's `once_differentiable` is not enough. If the gradient of the output requires no gradient,
    `once_differentiable` silently treats the gradients of the inputs as constants.
    """

    def marked(ctx: Any, grad: Tensor) -> tuple:
        if not torch.is_grad_enabled():  # the usual case, without create_graph
            return backward(ctx, grad)
        return _NoSecondDerivative.apply(lambda: backward(ctx, grad), grad, *ctx.saved_tensors)

    return marked
