"""Compute attention by torch's FlexAttention, with a score_mod made from the embedding's formula.

A distance kernel is a bias b or a factor w that depends only on the query-key distance. A score_mod
is a function that FlexAttention applies to each score. The embedding's torch formula is read as a
symbolic expression (`trace`). The score_mod evaluates the expression at the score's distance, with
the parameters theta of the score's head. Some formulas cannot be read as an expression. Their
values are tabulated over distances, and the score_mod looks up the value at the score's distance.
The score_mod also looks up the decay. FlexAttention's block mask excludes keys outside a window or
in other documents. Without documents, the block mask is cached for later calls. With a sink, the
output is multiplied by 1 - p, where p is the softmax weight of the null key.

On CUDA this backend is compiled. It adds up theta's gradient with one atomic addition per score,
which is slow and not repeatable bit for bit. Prefer the backend `fused`. `flex` is for comparison
and for machines on which this project's Triton kernels are not wanted.

Legend: B batch, H query heads, K key heads, T queries, S keys, E head size, N columns of theta.

Caution: on a CPU this backend supports evaluation only, because torch's FlexAttention has no
backward pass there. It is not compiled on a CPU and materialises the score matrix.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, compiler

from megatron.attention.backend import AttentionError, Backend, Request, weighted
from megatron.attention.call import Call
from megatron.attention.formulas.trace import Unreadable, read, torch_function
from megatron.positional import PositionalEmbedding

if TYPE_CHECKING:
    from megatron.kernels.lowering import Formula

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of (score, batch index, head, query i, key j) that returns score * w(d) + b(d).

w and b are the distance kernel's factor and bias, and d is the query-key distance."""


def flex(call: Call) -> Any:
    """Compute attention by torch's FlexAttention.

    Return the output [batch, heads, queries, head size], or (output, lse) if the call asks for lse.
    lse is the log-sum-exp of each softmax.
    """
    from torch.nn.attention.flex_attention import AuxRequest

    theta_HN = call.theta if call.has_kernel else None
    tensors = (call.q_BHTE, call.k_BKSE, call.v_BKSE, theta_HN, call.decay_BHS, call.sink_H)
    if not torch.is_grad_enabled():  # on a CPU torch refuses inputs that require a gradient
        tensors = (None if x is None else x.detach() for x in tensors)
    *inputs, theta_HN, decay_BHS, sink_H = tensors
    if theta_HN is not None:
        theta_HN = theta_HN.to(torch.promote_types(call.q_BHTE.dtype, torch.float32))
    offset, keys = call.query_offset, call.k_BKSE.shape[2]
    positions_BT = call.positions().expand(len(call.q_BHTE), -1) if call.has_kernel else None
    score_mod = score_mod_of(call.pos, theta_HN, keys, offset, positions_BT)
    if decay_BHS is not None:
        score_mod = decayed(score_mod, decay_BHS, offset)
    options: dict[str, Any] = {}
    if call.return_lse or sink_H is not None:
        options = {"return_aux": AuxRequest(lse=True)}
    out = function_for(call.q_BHTE.device.type)(
        *inputs,
        score_mod=score_mod,
        block_mask=block_mask_of(call),
        scale=call.scale,
        enable_gqa=call.q_BHTE.shape[1] != call.k_BKSE.shape[1],
        kernel_options=kernel_options(call.pos, call.q_BHTE.shape[-1]),
        **options,
    )
    if not options:
        return out
    out_BHTE, lse_BHT = out[0], out[1].lse
    if sink_H is not None:
        seen_BHT = torch.sigmoid(lse_BHT - sink_H[:, None])  # the weight of all keys but the null
        out_BHTE = (out_BHTE * seen_BHT[..., None]).to(out_BHTE.dtype)
        lse_BHT = lse_BHT.logaddexp(sink_H[:, None])
    return (out_BHTE, lse_BHT) if call.return_lse else out_BHTE


def score_mod_of(
    pos: PositionalEmbedding, theta_HN: Tensor | None, length: int, offset: int = 0,
    positions_BT: Tensor | None = None,
) -> ScoreMod | None:  # fmt: skip
    """Return a function for FlexAttention's `score_mod` that applies a positional embedding.

    The function applies the distance kernel and its temperature, but no sink, rotation or gate.
    Return None if the embedding has no distance kernel.

    Args:
        pos: The positional embedding.
        theta_HN: The embedding's parameters [heads, parameters].
        length: The number of keys.
        offset: The position of the first query.
        positions_BT: The position of each query in its document [batch, queries]. None: query i is
            at position `offset` + i.

    Raises:
        AttentionError: The embedding has a distance kernel, but `theta_HN` is None.
    """
    if not pos.has("distance"):
        return None
    if theta_HN is None:
        raise AttentionError(f"{pos.name} needs theta [heads, {len(pos.parameters)}], got none")
    formula = formula_of(pos)
    if formula is None:
        return tabulated(pos, theta_HN, length, offset)

    bias, weight = (
        None if expression is None else torch_function(expression, formula.arguments)
        for expression in (formula.bias, formula.weight)
    )
    # FlexAttention allows only one lookup in a tensor that requires a gradient. Therefore each
    # column is copied to a separate tensor.
    columns = [column.clone() for column in theta_HN.unbind(1)]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        d = (i + offset - j).clamp(min=0).to(theta_HN.dtype)
        arguments = [d, *(column[h] for column in columns)]
        position = i + offset if positions_BT is None else positions_BT[b, i]
        arguments.insert(1, position.to(d.dtype))
        if weight is not None:
            score = score * weight(*arguments)
        return score if bias is None else score + bias(*arguments)

    return score_mod


def tabulated(pos: PositionalEmbedding, theta_HN: Tensor, length: int, offset: int) -> ScoreMod:
    """Return a `score_mod` that loads the embedding's values from tables over distances.

    Args:
        pos: The positional embedding.
        theta_HN: The embedding's parameters [heads, parameters].
        length: The number of keys.
        offset: The position of the first query.
    """
    d = torch.arange(length, device=theta_HN.device)
    # The tables have values for the distances 0 ... length - 1.
    bias_HS, weight_HS = pos.bias(theta_HN, d), pos.weight(theta_HN, d)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        d = (i + offset - j).clamp(min=0)
        if weight_HS is not None:
            score = score * weight_HS[h, d]
        return score if bias_HS is None else score + bias_HS[h, d]

    return score_mod


def decayed(score_mod: ScoreMod | None, decay_BHS: Tensor, offset: int) -> ScoreMod:
    """Return a `score_mod` that applies the given `score_mod` and then adds the decay."""
    rows_BHS = decay_BHS.clone()  # only one lookup may be in a tensor that requires a gradient

    def with_decay(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if score_mod is not None:
            score = score_mod(score, b, h, i, j)
        lost = decay_BHS[b, h, j] - rows_BHS[b, h, i + offset]
        return score - lost.to(score.dtype)

    return with_decay


@lru_cache(maxsize=64)
def formula_of(pos: PositionalEmbedding) -> Formula | None:
    """Return an embedding's formula as symbolic expressions, or None if this is impossible."""
    try:
        return read(pos)
    except Unreadable:
        return None


def kernel_options(pos: PositionalEmbedding, size: int) -> dict[str, int] | None:
    """Return FlexAttention's `kernel_options` for a head size, or None for torch's defaults."""
    if not pos.has("distance") or formula_of(pos) is not None:
        return None
    # The `score_mod` loads values from tables. In each stage, the kernel's loop prefetches a tile
    # of keys, one of values and one of table entries, fp32 [128, 128]. Three stages, torch's
    # default, need more shared memory than an H100 has (torch 2.11).
    if size > 64 or weighted(pos):
        return {"fwd_num_stages": 1, "bwd_num_stages": 2}
    return {"fwd_num_stages": 2}


def block_mask_of(call: Call) -> Any:
    """Return FlexAttention's block mask for one attention call, with its documents and window."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, _, queries, _ = call.q_BHTE.shape
    keys, offset, device = call.k_BKSE.shape[2], call.query_offset, call.q_BHTE.device
    first_BT = call.first_keys()
    if call.starts_BS is None or first_BT is None:
        return causal_mask(queries, keys, offset, device, call.window)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i + offset >= j) & (j >= first_BT[b, i])

    return create_block_mask(seen, batch, None, queries, keys, device=str(device))


@lru_cache(maxsize=8)
def causal_mask(
    queries: int, keys: int, offset: int, device: torch.device, window: int | None = None
) -> Any:
    """Return FlexAttention's block mask for causal attention, with an optional window."""
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if window is None:
            return i + offset >= j
        return (i + offset >= j) & (i + offset - j <= window)

    # The cached mask is saved by later backward passes, which cannot save inference tensors.
    with torch.inference_mode(False):
        return create_block_mask(seen, None, None, queries, keys, device=str(device))


@lru_cache(maxsize=2)
def function_for(device_type: str) -> Callable[..., Any]:
    """Return torch's flex_attention, compiled on CUDA and uncompiled on other devices."""
    from torch.nn.attention.flex_attention import flex_attention

    if device_type == "cuda":
        # The function is compiled for every length, with and without gradients, which is more often
        # than torch allows by default. `fullgraph` raises an error if compilation fails. Otherwise
        # torch would silently materialise the full score matrix, as with the stance `force_eager`.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return compiled if compiler.is_compiling() else compiler.set_stance("default")(compiled)

    def uncompiled(*inputs: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
            return flex_attention(*inputs, **options)

    return uncompiled


def refusal(request: Request) -> str | None:
    if request.device_type == "cpu" and request.training:
        return "has no backward pass on a CPU: it serves evaluation there"
    if request.device_type != "cpu" and request.dtype == torch.float64:
        return "does not compute in fp64 on a GPU"
    if (kernel := request.pos.kernel_part(None)[0]).reads_position and formula_of(kernel) is None:
        return f"cannot read the formula of {kernel.name}, which no table can hold"
    if request.dropout:
        return "has no dropout (attention_dropout must be 0)"
    return None


def remark(request: Request) -> str:
    if request.device_type == "cpu":
        return "uncompiled, with the full score matrix"
    return "theta's gradient by atomic additions, not repeatable bit for bit"


def tempers(pos: PositionalEmbedding) -> bool:
    """Return whether the `score_mod` multiplies the scores by the embedding's temperature."""
    return pos.tempers_bias and pos.has("distance")


BACKEND = Backend("flex", flex, refusal, remark, grouped=True, tempers=tempers, gives_lse=True)
