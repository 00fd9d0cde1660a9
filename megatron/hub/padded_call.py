"""Compute attention of an exported model by the implementation that its user chose.

    eager            the attention formula; required for returning attention probabilities
    sdpa             torch's scaled_dot_product_attention for blocks of queries, with the distance
                     kernel as the mask; for gradients the backend `blocked` of this project
    flex_attention   torch's FlexAttention, with the distance kernel in the score_mod
    kerple           this project's attention, if it is installed (see `kerple_attention`)

Other attention functions of transformers would leave out the positional embedding, so they are
refused. Scores are computed in fp32 or a wider dtype, also under autocast. Except with `eager`,
memory is linear in the number of tokens. In a compiled graph with a static cache, `eager` replaces
the chosen implementation. In a graph of `torch.export` with several new tokens, `eager` replaces
`sdpa`.

Legend: B texts, T new tokens, S all tokens (cached ones and new ones), H heads, K key heads, E head
size, R queries of a block, n keys of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megatron.attention.call import Call, lowered
from megatron.attention.eager import eager
from megatron.attention.tiled.blocked_function import arguments_of, run
from megatron.attention.tiled.toeplitz import DistanceVector

BLOCK = 128
"""The largest number of queries in one call of scaled_dot_product_attention."""


@dataclass(frozen=True)
class PaddedCall(Call):
    """The arguments of attention for texts that may be padded or packed.

    Attributes:
        columns_T: For each query, the index of its own key.
        first_BT: For each query, the index of the first key to which it may attend. None if all
            queries may attend to key 0.
        vectors: The bias vectors computed so far. Several layers may use the same vector.
    """

    columns_T: Tensor = field(kw_only=True)
    first_BT: Tensor | None = field(kw_only=True)
    # In a pass without gradients.
    vectors: dict[Any, DistanceVector | None] = field(kw_only=True)

    @property
    def masked(self) -> bool:
        return self.first_BT is not None or self.window is not None

    @property
    def end(self) -> int:
        return self.k_BKSE.shape[2]

    def query_rows(self) -> Tensor:
        return self.columns_T

    def query_starts(self) -> Tensor | None:
        return self.first_BT

    def positions(self) -> Tensor:
        """Return the position of each query in its document, not counting padding."""
        positions_BT = self.absolute_positions()
        if self.first_BT is None:
            return positions_BT
        return positions_BT.minimum(self.columns_T - self.first_BT)


def attend_as(name: str, module: nn.Module, call: PaddedCall, offset: int | None) -> Tensor:
    """Return the attention output [batch, heads, queries, head size].

    Args:
        name: The name of the implementation, as in transformers.
        module: The attention layer.
        call: The arguments of attention.
        offset: The index of the first query's own key. None in a compiled graph with a static
            cache, where the number is known only on the device.

    Raises:
        ValueError: The implementation would leave out the positional embedding.
    """
    if name not in _IMPLEMENTATIONS:
        raise ValueError(
            f"attn_implementation {name!r} would leave out the positional embedding; use one of "
            f"{', '.join(_IMPLEMENTATIONS)}"
        )
    with torch.autocast(call.q_BHTE.device.type, enabled=False):
        return _IMPLEMENTATIONS["eager" if offset is None else name](module, call)


def probabilities(call: PaddedCall) -> Tensor:
    """Return the attention probabilities [batch, heads, queries, keys]."""
    shape = (*call.k_BKSE.shape[:2], call.end, call.end)
    # The output of attention to values that are one-hot vectors.
    v_BKSS = torch.eye(call.end, device=call.q_BHTE.device).expand(shape)
    with torch.autocast(call.q_BHTE.device.type, enabled=False):
        return eager(lowered(replace(call, v_BKSE=v_BKSS), grouped=False))


def _eager(module: nn.Module, call: PaddedCall) -> Tensor:
    return eager(lowered(call, grouped=False))


def _sdpa(module: nn.Module, call: PaddedCall) -> Tensor:
    several = call.q_BHTE.shape[2] > 1
    if several and torch.compiler.is_exporting():
        return _eager(module, call)
    simple = lowered(call, grouped=True)
    plain = simple.decay_BHS is None and simple.sink_H is None
    whole = call.end == call.q_BHTE.shape[2]
    if plain and not (simple.has_kernel or simple.masked) and (whole or not several):
        return _torch_sdpa(module, simple, None)
    inputs = (simple.q_BHTE, simple.k_BKSE, simple.v_BKSE, simple.theta_HN, simple.decay_BHS)
    learns = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (*inputs, simple.sink_H)
    )
    compute = _outside_of_graphs if several and torch.compiler.is_compiling() else _in_blocks
    return compute(module, call, simple, plain and not learns)


def _in_blocks(module: Any, call: PaddedCall, simple: Call, plain: bool) -> Tensor:
    """Compute attention for one block of queries after the other.

    Args:
        module: The attention layer.
        call: The arguments of attention.
        simple: The result of `lowered(call, grouped=True)`.
        plain: Whether attention has no decay and no sink, and needs no gradients. Only then can
            torch's SDPA compute it.
    """
    vector = _vector(module, simple, call.vectors) if plain else None
    if vector is not None:
        return _by_torch(module, simple, vector)
    if call.q_BHTE.shape[2] == 1 and not torch.is_grad_enabled():
        return _eager(module, call)
    return run(*arguments_of(lowered(call, grouped=False)))


# As `torch.compiler.disable`: a graph would hold the operations of every block.
_outside_of_graphs = torch._disable_dynamo(_in_blocks)  # pyright: ignore[reportPrivateImportUsage]


def _vector(module: Any, simple: Call, known: dict) -> DistanceVector | None:
    """Return the bias and the window as one vector over distances.

    The result is None if the positional embedding cannot be written as such a vector.
    """
    columns = module.columns
    key = module.pos, columns.start, columns.stop, module.window, simple.q_BHTE.device
    if key not in known:
        _, _, _, bias_HS, weight_HS, *_ = arguments_of(simple)[0]
        known[key] = None
        if bias_HS is not None and weight_HS is None and not simple.pos.reads_position:
            known[key] = DistanceVector(bias_HS, BLOCK, -torch.inf)
    return known[key]


def _by_torch(module: nn.Module, call: Call, vector: DistanceVector) -> Tensor:
    """Compute attention with torch's SDPA."""
    dtype = torch.promote_types(call.q_BHTE.dtype, torch.float32)
    q_BHTE, k_BKSE, v_BKSE = (x.to(dtype) for x in (call.q_BHTE, call.k_BKSE, call.v_BKSE))
    starts_BT, parts = call.query_starts(), []
    for q_BHRE in q_BHTE.split(BLOCK, dim=2):
        begin = BLOCK * len(parts)
        end = begin + q_BHRE.shape[2]
        keys = call.end - q_BHTE.shape[2] + end
        mask_BHRn = vector.block(slice(None), end - begin, keys)[None]
        if starts_BT is not None:
            key_n = torch.arange(keys, device=starts_BT.device)
            hidden_BRn = key_n < starts_BT[:, begin:end].flip(1)[..., None]
            mask_BHRn = mask_BHRn.masked_fill(hidden_BRn[:, None], -torch.inf)
        seen = {"k_BKSE": k_BKSE[:, :, :keys], "v_BKSE": v_BKSE[:, :, :keys]}
        # The masks are views of `vector`. They need the queries in reversed order.
        block = replace(call, q_BHTE=q_BHRE.flip(2), **seen)
        parts.append(_torch_sdpa(module, block, mask_BHRn).flip(2))
    return torch.cat(parts, dim=2).to(call.q_BHTE.dtype)


def _torch_sdpa(module: nn.Module, call: Call, mask_BHRn: Tensor | None) -> Tensor:
    causal = mask_BHRn is None and call.q_BHTE.shape[2] > 1
    inputs = call.q_BHTE, call.k_BKSE, call.v_BKSE, mask_BHRn
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return sdpa(module, *inputs, scaling=call.scale, is_causal=causal)[0].transpose(1, 2)


def _flex(module: Any, call: PaddedCall) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask
    from transformers.integrations.flex_attention import compile_friendly_flex_attention

    simple = replace(lowered(call, grouped=True), window=None)
    if simple.pos.reads_position or not (simple.decay_BHS is None and simple.sink_H is None):
        raise ValueError(f"flex_attention cannot compute {module.pos.name}; use sdpa")
    inputs: Any = arguments_of(simple)[0][:5]
    if not torch.is_grad_enabled():  # on a CPU torch refuses inputs that require gradients
        inputs = [None if x is None else x.detach() for x in inputs]
    *qkv, bias_HS, weight_HS = inputs
    columns_T, (batch, _, queries, _) = call.columns_T, call.q_BHTE.shape
    first_BT = call.first_keys()
    first_BT = torch.zeros_like(columns_T)[None] if first_BT is None else first_BT
    first_BT = first_BT.expand(batch, -1)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        d = (columns_T[t] - s).clamp(min=0)
        score = score if weight_HS is None else score * weight_HS[h, d]
        return score + bias_HS[h, d]

    def mask_mod(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s <= columns_T[t]) & (s >= first_BT[b, t])

    shape = batch, None, queries, call.end
    mask = create_block_mask(mask_mod, *shape, device=str(columns_T.device))
    options: Any = {"score_mod": score_mod, "block_mask": mask, "scale": call.scale}
    options |= {"enable_gqa": qkv[0].shape[1] != qkv[1].shape[1], "training": module.training}
    out: Any = compile_friendly_flex_attention(*qkv, **options)
    return out


def _kerple(module: nn.Module, call: PaddedCall) -> Tensor:
    inputs = call.q_BHTE, call.k_BKSE, call.v_BKSE, None
    kerple = ALL_ATTENTION_FUNCTIONS["kerple"]
    return kerple(module, *inputs, scaling=call.scale, call=call)[0].transpose(1, 2)


_IMPLEMENTATIONS = {"eager": _eager, "sdpa": _sdpa, "flex_attention": _flex, "kerple": _kerple}
