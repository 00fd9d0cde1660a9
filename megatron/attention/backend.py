"""What an attention backend is: a function of a `Call`, and what it refuses.

Legend: see `choice`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.positional import PositionalEmbedding


@dataclass(frozen=True)
class Call:
    """The inputs of one attention call. `choice.AttentionFn` describes each of them."""

    q_BHTE: Tensor
    k_BKSE: Tensor
    v_BKSE: Tensor
    pos: PositionalEmbedding
    theta_HN: Tensor | None
    scale: float
    dropout_p: float
    query_offset: int

    @property
    def has_kernel(self) -> bool:
        """Whether the embedding is a kernel of distance."""
        return self.pos.kind == "distance"

    @property
    def theta(self) -> Tensor:
        """Theta [H, N] of a kernel of distance, which always has one."""
        assert self.theta_HN is not None
        return self.theta_HN

    @property
    def wants_gradients(self) -> bool:
        inputs = (self.q_BHTE, self.k_BKSE, self.v_BKSE, self.theta_HN)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)

    @property
    def layout(self) -> tuple:
        """Everything that the checks depend on: shapes, dtypes, devices and numbers."""
        tensors = (self.q_BHTE, self.k_BKSE, self.v_BKSE, self.theta_HN)
        shapes = (None if x is None else (x.shape, x.dtype, x.device) for x in tensors)
        numbers = (self.scale, self.dropout_p, self.query_offset)
        return *shapes, *numbers, self.pos, self.wants_gradients


@dataclass(frozen=True)
class Request:
    """What a backend is requested for.

    Attributes:
        pos: the embedding.
        device_type: "cpu" or "cuda".
        dtype: of q, k and v.
        training: whether gradients are wanted.
        dropout: whether softmax weights are dropped.
        head_size: E, where it is known.
    """

    pos: PositionalEmbedding
    device_type: str
    dtype: torch.dtype
    training: bool = True
    dropout: bool = False
    head_size: int | None = None


@dataclass(frozen=True)
class Backend:
    """A way to compute attention.

    Attributes:
        name: as in `attention_backend`.
        function: computes the output [B, H, T, E] of a call that has no keys after the last query:
            S = query_offset + T.
        refusal: why the backend does not serve a request, or None.
        remark: what the log adds when the backend serves a request.
        grouped: whether k and v may have fewer heads than q.
    """

    name: str
    function: Callable[[Call], Tensor]
    refusal: Callable[[Request], str | None] = lambda request: None
    remark: Callable[[Request], str] = lambda request: ""
    grouped: bool = False


def weighted(pos: PositionalEmbedding) -> bool:
    """Whether the embedding multiplies the products of queries and keys."""
    if pos.kind != "distance":
        return False
    return pos.weight(torch.ones(1, len(pos.parameters)), torch.arange(2)) is not None


class _NoSecondDerivative(torch.autograd.Function):
    """Marks the results of `run` as differentiable in `tensors`, so that a second backward pass
    raises an error instead of returning zeros."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], tuple], *tensors: Tensor | None) -> tuple:
        return run()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "this attention backend has no second derivative: use attention_backend eager"
        )


def first_order(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorate a backward pass that has no derivative: differentiating it is an error.

    torch's `once_differentiable` raises that error only where the output's gradient requires a
    gradient; otherwise the result would be treated as a constant, silently.
    """

    def marked(ctx: Any, grad: Tensor) -> tuple:
        if not torch.is_grad_enabled():  # the usual case, without create_graph
            return backward(ctx, grad)
        return _NoSecondDerivative.apply(lambda: backward(ctx, grad), grad, *ctx.saved_tensors)

    return marked
