"""torch's FlexAttention, its score_mod derived from the embedding's torch formula.

The formula as an expression (``formula``) is evaluated on the score's own distance and the row of
theta of its head; an embedding without one is tabulated over distances, and the score looks up its
entry. Compiled on CUDA, where theta's gradient is scattered with atomic additions, score by score:
slow, and not repeatable bit for bit. ``fused`` is what to use; this is here for comparison and for
machines where Triton's own kernels are not wanted.

Legend: B batch, H query heads, T queries, S keys, E head size, N columns of theta.

Caution: on a CPU torch serves it forward only, and here uncompiled, with the whole score matrix.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron.attention.backend import Backend, Use, weighted
from megatron.attention.trace import Formula, Unreadable, read, torch_function
from megatron.positional import PositionalEmbedding


def flex(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    pos: PositionalEmbedding,
    theta_HN: Tensor | None,
    *,
    scale: float,
    dropout_p: float,
    query_offset: int,
) -> Tensor:
    """See :class:`megatron.attention.choice.AttentionFn`."""
    dtype = torch.promote_types(q_BHTE.dtype, torch.float32)
    if theta_HN is not None:
        theta_HN = (theta_HN if torch.is_grad_enabled() else theta_HN.detach()).to(dtype)
    queries, keys = q_BHTE.shape[2], k_BKSE.shape[2]
    score_mod = score_mod_of(pos, theta_HN, query_offset, query_offset + queries)
    mask = causal_mask(queries, keys, query_offset, q_BHTE.device)
    inputs = (q_BHTE, k_BKSE, v_BKSE)
    if not torch.is_grad_enabled():  # on a CPU torch refuses whatever could have a gradient
        inputs = tuple(x.detach() for x in inputs)
    options = {
        "score_mod": score_mod,
        "block_mask": mask,
        "scale": scale,
        "enable_gqa": q_BHTE.shape[1] != k_BKSE.shape[1],
        "kernel_options": kernel_options(pos, q_BHTE.shape[-1]),
    }
    return function_for(q_BHTE.device.type)(*inputs, **options)


def score_mod_of(
    pos: PositionalEmbedding, theta_HN: Tensor | None, offset: int, length: int, table: bool = False
) -> Callable[..., Tensor] | None:
    """(score, b, h, i, j) -> score w(d) + b(d).

    Args:
        table: look b and w up, even where there is an expression.
    """
    if pos.kind != "distance":
        return None
    formula = None if table else formula_of(pos)
    if formula is None:
        return tabulated(pos, theta_HN, offset, length)

    arguments = (formula.distance, *formula.theta)
    bias, weight = (
        None if part is None else torch_function(part, arguments)
        for part in (formula.bias, formula.weight)
    )
    # A tensor that wants a gradient may be looked up but once: a column each, in memory of its own.
    columns = [column.clone() for column in theta_HN.unbind(1)]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        d = (i + offset - j).clamp(min=0).to(theta_HN.dtype)
        theta = [column[h] for column in columns]
        if weight is not None:
            score = score * weight(d, *theta)
        return score if bias is None else score + bias(d, *theta)

    return score_mod


def tabulated(
    pos: PositionalEmbedding, theta_HN: Tensor, offset: int, length: int
) -> Callable[..., Tensor]:
    d = torch.arange(length, device=theta_HN.device)
    bias_HS, weight_HS = pos.bias(theta_HN, d), pos.weight(theta_HN, d)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        d = (i + offset - j).clamp(min=0)
        if weight_HS is not None:
            score = score * weight_HS[h, d]
        return score if bias_HS is None else score + bias_HS[h, d]

    return score_mod


@lru_cache(maxsize=64)
def formula_of(pos: PositionalEmbedding) -> Formula | None:
    """The expression of b and w; None where they must be looked up."""
    try:
        return read(pos)
    except Unreadable:
        return None


def kernel_options(pos: PositionalEmbedding, size: int, table: bool = False) -> dict | None:
    """What torch does not choose well by itself, for heads of ``size``.

    What is looked up is copied ahead like keys and values, a tile [128, 128] of fp32 for each stage
    of the loop: with torch's three stages, more shared memory than an H100 has (torch 2.11).
    """
    if pos.kind != "distance" or not (table or formula_of(pos) is None):
        return None
    if size > 64 or weighted(pos):
        return {"fwd_num_stages": 1, "bwd_num_stages": 2}
    return {"fwd_num_stages": 2}


@lru_cache(maxsize=8)
def causal_mask(queries: int, keys: int, offset: int, device: torch.device) -> Any:
    """Which blocks of the score matrix hold a score of the past."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i + offset >= j

    # Kept for later calls, whose backward pass could not save tensors of inference mode.
    with torch.inference_mode(False):
        return create_block_mask(seen, None, None, queries, keys, device=str(device))


@lru_cache(maxsize=2)
def function_for(device_type: str) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    if device_type == "cuda":
        # Compiled for every length, with and without gradients: more often than torch expects.
        # fullgraph: an error where it could not be compiled, not the whole score matrix in silence.
        limit = max(torch._dynamo.config.recompile_limit, 64)
        torch._dynamo.config.recompile_limit = limit
        return torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def uncompiled(*inputs: Tensor, **options: Any) -> Tensor:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex_attention(*inputs, **options)

    return uncompiled


def refusal(use: Use) -> str | None:
    if use.device_type == "cpu" and use.training:
        return "has no backward pass on a CPU: it serves evaluation there"
    if use.device_type != "cpu" and use.dtype == torch.float64:
        return "does not compute in fp64 on a GPU"
    if use.dropout:
        return "has no dropout (attention_dropout must be 0)"
    return None


def remark(use: Use) -> str:
    if use.device_type == "cpu":
        return "uncompiled, with the whole score matrix"
    return "theta's gradient by atomic additions, not repeatable bit for bit"


BACKEND = Backend("flex", flex, refusal, remark, grouped=True)
