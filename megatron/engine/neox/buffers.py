"""Compute the buffers that published (GPT-NeoX) checkpoints store, e.g. ALiBi's slopes.

A model computes these buffers from the configuration, and never loads them from a checkpoint. The
stored buffers are only compared with the computed ones.
"""

import torch
from torch import Tensor

from megatron.engine.neox import layout
from megatron.model import BlockShape
from megatron.positional import PositionalEmbedding
from megatron.positional.rotary import frequencies


def implied_buffers(
    block: BlockShape, pos: PositionalEmbedding, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Compute the buffers that a GPT-NeoX checkpoint of this model contains, rounded to `dtype`.

    Returns:
        A dict from GPT-NeoX's name to buffer.
    """
    sinusoidal, rotary, alibi = layout.BUFFERS
    if pos.has("input") and not pos.learnable:
        return {sinusoidal: frequencies(block.hidden_size, 10000.0, dtype, None)}
    if pos.has("rotary"):
        rotated = int(block.head_size * block.rotary_pct)
        return {rotary: frequencies(rotated, block.rotary_base, dtype, None)}
    if not pos.has("distance") or pos.learnable or pos.name not in layout.EMBEDDINGS:
        return {}
    slopes_H1 = pos.initial_theta(block.num_heads).to(dtype)
    name = layout.RPE + pos.parameters[0].name
    return {name: slopes_H1[..., None]} if name == layout.FIXED else {alibi: slopes_H1.flatten()}


def wrong_buffers(
    block: BlockShape, pos: PositionalEmbedding, stored: dict[str, Tensor]
) -> list[str]:
    """Return one error line for each stored buffer that contradicts the configuration.

    Args:
        stored: The checkpoint's buffers, as a dict from GPT-NeoX's name to buffer.
    """
    # A buffer that is missing from `stored` is no error.
    wrong = []
    for name, tensor in stored.items():
        implied = implied_buffers(block, pos, tensor.dtype).get(name)
        if name == layout.FIXED:
            tensor = tensor.clamp(min=0.01)  # as the published code does in its first forward pass
        if (
            implied is None
            or implied.shape != tensor.shape
            or not torch.allclose(implied.float(), tensor.float(), rtol=1e-2, atol=0.0)
        ):
            wrong.append(f"{name}: other values than pos_emb {pos.name} has here")
    return wrong
