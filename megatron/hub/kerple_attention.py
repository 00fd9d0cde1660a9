"""Register this project's attention in transformers, as the implementation `kerple`.

    import megatron.hub.kerple_attention
    AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True, attn_implementation="kerple")

An exported model then computes attention with the backend that `attention_backend: auto` chooses,
for example with the fused kernels on a GPU. Models that this project did not export are refused,
because they do not pass a `PaddedCall`.

Legend: B texts, T new tokens, S all tokens, H heads, E head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from megatron.attention import Call, choose
from megatron.hub.backbone import positional_of
from megatron.positional import PositionalEmbedding

_KNOWN: dict[Any, PositionalEmbedding] = {}


def kerple_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    call: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention output [batch, queries, heads, head size], and None.

    transformers expects the attention probabilities in place of None.

    Args:
        attention_mask: Unused, because `call` describes the padding and the documents.
        scaling: The number that multiplies the query-key products.
        call: The arguments of attention, as a `PaddedCall`. Only exported models pass it.

    Raises:
        ValueError: The model is not an export of this project.
    """
    if call is None:
        raise ValueError(
            "attn_implementation kerple serves exports of this project alone; use sdpa"
        )
    offset, first_BT = key.shape[2] - query.shape[2], call.first_BT
    pos = _embedding(module)
    positions_BT = call.positions() if pos.reads_position else call.positions_BT
    attend = choose(
        "auto", pos, device_type=query.device.type, dtype=query.dtype,
        training=torch.is_grad_enabled(), head_size=query.shape[-1], masked=call.masked,
        decays=pos.has("gate"),
    )  # fmt: skip
    inputs = Call(
        query, key, value, pos, call.theta_HN, scale=scaling, query_offset=offset,
        decay_BHS=call.decay_BHS, window=call.window, positions_BT=positions_BT,
        sequence_positions_BT=call.positions_BT,
        starts_BS=None if first_BT is None else F.pad(first_BT, (offset, 0)),
    )  # fmt: skip
    out_BHTE = attend(inputs)
    return out_BHTE.transpose(1, 2).contiguous(), None


def _embedding(module: Any) -> PositionalEmbedding:
    """Return the positional embedding of an exported layer, built from this project's classes."""
    # The layer has a copy of the class from the exported Python file.
    config, index = module.config, module.index
    key = str((config.pos_emb, config.pos_emb_options, config.distance_scale)), index
    if key not in _KNOWN:
        _KNOWN[key] = positional_of(config).of_layer(index)[0]
    return _KNOWN[key]


AttentionInterface.register("kerple", kerple_attention)
