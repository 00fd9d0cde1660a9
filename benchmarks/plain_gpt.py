"""Define a plain GPT, the yardstick of `train_step.py`: few lines, and no distance kernel.

Pre-norm blocks with GELU, one projection for queries, keys and values, and attention by torch's
`scaled_dot_product_attention`. Positions come from a trained table. With `theta`, attention is that
of the released KERPLE code instead (see `attention_variants.published`), and there is no table.

Legend: B batch, H heads, T positions, D hidden size, E head size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.attention_variants import LOG, published


class PlainBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); x is [B, T, D]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTD: Tensor, theta_HN: Tensor | None) -> Tensor:
        qkv = self.qkv(self.norm1(x_BTD)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        if theta_HN is None:
            out_BHTE = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out_BHTE = published(q, k, v, theta_HN)
        x_BTD = x_BTD + self.out(out_BHTE.transpose(1, 2).flatten(2))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class PlainGPT(nn.Module):
    """Maps inputs and targets, both [B, T], to the mean loss."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocab: int, theta: bool):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.logits = nn.Linear(width, vocab, bias=False)
        generator = torch.Generator().manual_seed(1)
        self.theta = nn.Parameter(LOG.initial_theta(heads, generator)) if theta else None
        self.positions = None if theta else nn.Parameter(torch.zeros(length, width))
        for weight in self.parameters():
            if weight.dim() == 2 and weight is not self.theta:
                nn.init.normal_(weight, std=0.02)

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(inputs_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self.positions[: inputs_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD, self.theta)
        logits_BTV = self.logits(self.norm(x_BTD))
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())
