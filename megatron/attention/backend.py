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
        function: called as in :class:`megatron.attention.choice.AttentionFn`.
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
