"""What an attention backend is: a function, and an honest word about what it does not serve.

Legend: see ``choice``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.positional import PositionalEmbedding


@dataclass(frozen=True)
class Use:
    """What a backend is wanted for.

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
        name: as in ``attention_backend``.
        function: called as in :class:`megatron.attention.choice.AttentionFn`, without the keys
            that no query sees: S = query_offset + T.
        refusal: why it does not serve a use, or None.
        remark: what to know when it serves one, for the log.
        grouped: whether it takes fewer key heads than query heads as they are.
        rounds_as_published: whether it can round to 16 bits where ``published_numerics`` asks.
    """

    name: str
    function: Callable[..., Tensor]
    refusal: Callable[[Use], str | None] = lambda use: None
    remark: Callable[[Use], str] = lambda use: ""
    grouped: bool = False
    rounds_as_published: bool = False


def weighted(pos: PositionalEmbedding) -> bool:
    """Whether the embedding multiplies the products of queries and keys."""
    if pos.kind != "distance":
        return False
    return pos.weight(torch.ones(1, len(pos.parameters)), torch.arange(2)) is not None


class NoSecond(torch.autograd.Function):
    """What ``run`` returns, differentiable in ``tensors`` as far as autograd can see."""

    @staticmethod
    def forward(ctx, run: Callable[[], tuple], *tensors: Tensor | None) -> tuple:
        return run()

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "this attention backend has no second derivative: use attention_backend eager"
        )


def first_order(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Mark a backward pass that has no derivative of its own: differentiating it is an error.

    torch's ``once_differentiable`` says so only where the output's gradient depends on something;
    else what was to be differentiated again would be a constant, in silence.
    """

    def marked(ctx, grad: Tensor) -> tuple:
        if not torch.is_grad_enabled():  # as nearly always: create_graph was not asked for
            return backward(ctx, grad)
        return NoSecond.apply(lambda: backward(ctx, grad), grad, *ctx.saved_tensors)

    return marked
