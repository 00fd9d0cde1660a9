"""Define the norm of the blocks. It may use apex's kernels, and may shard its weights by heads.

With `fused_norm`, layernorm and rmsnorm call apex's kernels. If apex is not installed, layernorm
and rmsnorm call torch's functions, which compute the same values. As in GPT-NeoX, the fused rmsnorm
has eps INSIDE the root.

If tensor-parallel ranks apply the same weights to different vectors, the gradients of the weights
are summed over these ranks (`copy_to`).
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron import nvidia_apex
from megatron.model.norm import Norm
from megatron.model.shape import BlockShape
from megatron.parallel.collectives import copy_to
from megatron.parallel.groups import ALONE, TensorGroup
from megatron.parallel.sharding import Sharding, mark_sharding

_Kernel = Callable[..., torch.Tensor]
_APEX = "apex.normalization.fused_layer_norm"


class BlockNorm(Norm):
    """The norm of hidden states, or of queries and keys.

    Args:
        shape: The description of the transformer block, which names the norm.
        tp: The tensor-parallel group.
        by_head: Whether the input is queries or keys [..., heads, head size]. If false, the input
            is hidden states.

    Raises:
        ValueError: `shape` names an unknown norm.
    """

    def __init__(self, shape: BlockShape, tp: TensorGroup = ALONE, *, by_head: bool = False):
        kind = kind_of(shape)
        dim, heads = shape.hidden_size, 1
        if by_head:
            dim, heads = shape.head_size, shape.num_heads // tp.size
        super().__init__(kind, dim, shape.norm_eps, heads, shape.numerics)
        self.kernel = apex_norm(shape)[0] if heads == 1 else None
        if by_head and kind != "scalenorm":
            for param in self.parameters():
                mark_sharding(param, Sharding(0), tp)
        # Ranks share the weights for different positions, or scalenorm's factor for their heads.
        shared = kind == "scalenorm" if by_head else tp.splits_sequence
        # As in gpt-neox, queries and keys share one norm, which has separate weights for each
        # head.
        self.tp = tp if shared else ALONE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights: Any = self._parameters.values()
        if self.tp.size > 1:
            weights = [copy_to(weight, self.tp) for weight in weights]
        if self.kernel is not None and not x.is_meta:  # a plan has no data
            return self.kernel(x, *weights, (self.dim,), self.eps)
        return self.normed(x, *weights)


def kind_of(shape: BlockShape) -> str:
    """Return the kind of a block's norm: `shape.norm`, or `fused_rmsnorm` for a fused rmsnorm.

    Raises:
        ValueError: `shape` names an unknown norm.
    """
    if shape.norm not in ("layernorm", "rmsnorm", "scalenorm"):
        raise ValueError(f"norm {shape.norm!r} is unknown; use layernorm, rmsnorm or scalenorm")
    return "fused_rmsnorm" if shape.norm == "rmsnorm" and shape.fused_norm else shape.norm


def apex_norm(shape: BlockShape) -> tuple[_Kernel | None, str]:
    """Return (apex's function for the norm of a block, text for the log).

    The function is None if the block uses torch's function.
    """
    if not shape.fused_norm:
        return None, ""
    name = {"layernorm": "fused_layer_norm_affine", "rmsnorm": "fused_rms_norm_affine"}[shape.norm]
    found, why = nvidia_apex.find(_APEX, name, "fused_layer_norm_cuda")
    if found is None:
        return None, f"torch's {shape.norm} instead of apex's, because {why}"
    return found, f"apex's {shape.norm}"
