"""Register this project's attention in transformers, as the implementation `kerple`.

    import megatron.hub.kerple_attention
    AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True, attn_implementation="kerple")

An exported model then uses the backend that `auto` chooses, on a GPU the fused kernels. So can any
causal model of transformers. Its masks are those of `sdpa`, in which each query must see all keys
from its first one to its own.

Legend: B texts, T new tokens, S all tokens, H heads, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from megatron.attention import choose
from megatron.hub.backbone import positional_of
from megatron.positional import PositionalEmbedding, load

_REFUSED = ("softcap", "s_aux", "position_bias")
_KNOWN: dict[Any, PositionalEmbedding] = {}


def kerple_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention output [batch, queries, heads, head size], and None for probabilities.

    Args:
        module: The attention layer.
        query, key, value: [batch, heads, tokens, head size].
        attention_mask: Whether each query sees each key, bool [batch, 1, queries, keys]. None means
            causal attention.
        scaling: The number that multiplies the query-key products. If None, it is 1/sqrt(head
            size).
        dropout: The probability of dropping a softmax weight.
        others: Other arguments of transformers. Those that would change the result are refused.

    Raises:
        ValueError: The model needs more than causal attention.
    """
    offset, call = key.shape[2] - query.shape[2], others.get("call")
    terms: dict[str, Any] = {"query_offset": offset, "dropout_p": dropout}
    pos, theta_HN, first_BT = load("none"), None, None
    if call is not None:
        pos, theta_HN, first_BT = _embedding(module), call.theta_HN, call.first_BT
        terms |= {"decay_BHS": call.decay_BHS, "window": call.window}
        both = pos.has("temperature") and not pos.tempers_bias
        terms["positions_BT"] = call.positions() if pos.reads_position else call.positions_BT
        if both and pos.reads_position and not torch.equal(call.positions(), call.positions_BT):
            raise ValueError(f"kerple cannot separate documents with {pos.name}; use sdpa")
    elif wrong := [name for name in _REFUSED if others.get(name) is not None]:
        raise ValueError(f"attn_implementation kerple does not serve {', '.join(wrong)}")
    elif attention_mask is None:
        causal = others.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if query.shape[2] > 1 and not causal:
            raise ValueError("attn_implementation kerple serves causal attention alone; use sdpa")
    else:
        first_BT = _first_keys(attention_mask, offset)
    if first_BT is not None:
        terms["starts_BS"] = F.pad(first_BT, (offset, 0))
    attend = choose(
        "auto",
        pos,
        device_type=query.device.type,
        dtype=query.dtype,
        training=torch.is_grad_enabled(),
        head_size=query.shape[-1],
        dropout=dropout > 0.0,
        masked=first_BT is not None or terms.get("window") is not None,
        decays=pos.has("gate"),
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out_BHTE = attend(query, key, value, pos, theta_HN, scale=scale, **terms)
    return out_BHTE.transpose(1, 2).contiguous(), None


def _embedding(module: Any) -> PositionalEmbedding:
    """Return this project's version of an exported layer's positional embedding."""
    # The layer has a copy of the class from the exported Python file.
    config, index = module.config, module.index
    key = str((config.pos_emb, config.pos_emb_options, config.distance_scale)), index
    if key not in _KNOWN:
        _KNOWN[key] = positional_of(config).of_layer(index)[0]
    return _KNOWN[key]


def _first_keys(seen_B1TS: Tensor, offset: int) -> Tensor:
    """Return the first key that each query sees, int64 [batch, queries].

    Raises:
        ValueError: The mask is not bool, differs between heads, or is not causal with one start.
    """
    if seen_B1TS.dtype != torch.bool or seen_B1TS.shape[1] != 1:
        found = f"{seen_B1TS.dtype} {list(seen_B1TS.shape)}"
        raise ValueError(f"attn_implementation kerple serves a bool mask [B, 1, T, S], not {found}")
    seen_BTS = seen_B1TS[:, 0]
    key_S = torch.arange(seen_BTS.shape[2], device=seen_BTS.device)
    own_T1 = key_S[offset:, None]
    first_BT = torch.where(seen_BTS.any(-1), seen_BTS.int().argmax(-1), own_T1[:, 0])
    causal_BTS = (key_S >= first_BT[..., None]) & (key_S <= own_T1)
    others_BTS = seen_BTS != causal_BTS
    if (others_BTS & seen_BTS.any(-1, keepdim=True)).any():
        raise ValueError("attn_implementation kerple serves causal attention to neighbours alone")
    return first_BT


AttentionInterface.register("kerple", kerple_attention)
AttentionMaskInterface.register("kerple", sdpa_mask)
