"""How a parameter is sharded over the tensor-parallel ranks.

A sharded parameter carries its `Sharding`; one without it is the same on every rank. Initial values
are drawn in full and then sliced, and a checkpoint joins the slices again. Therefore the layout
changes no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from megatron.parallel.groups import TensorGroup


@dataclass(frozen=True)
class Sharding:
    """Equal slices of dimension `dim`, which holds `blocks` tensors one after the other.

    Each block is split separately: a gated MLP stacks value and gate, and every rank needs the same
    rows of both.
    """

    dim: int
    blocks: int = 1

    def slice(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Slice `rank` of `size` (a copy)."""
        blocks = full.chunk(self.blocks, self.dim)
        slices = [block.chunk(size, self.dim)[rank] for block in blocks]
        return torch.cat(slices, self.dim).contiguous()

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """The full tensor from the slices of all ranks, in order."""
        chunks = [each.chunk(self.blocks, self.dim) for each in slices]
        return torch.cat([each[b] for b in range(self.blocks) for each in chunks], self.dim)

    def full_shape(self, slice_shape: torch.Size, size: int) -> torch.Size:
        """Shape of the full tensor, from the shape of one of `size` slices."""
        shape = list(slice_shape)
        shape[self.dim] *= size
        return torch.Size(shape)


class _Marked(nn.Parameter):
    """The attributes that `mark_sharding` stores on a parameter (for the type checker)."""

    sharding: Sharding
    shard_rank: int
    shard_count: int
    model_parallel: bool
    tensor_model_parallel: bool


def mark_sharding(param: Tensor, sharding: Sharding, tp: TensorGroup) -> None:
    """Store on `param` how it is sharded; in a group of one, how it would be."""
    marked = cast(_Marked, param)
    marked.sharding, marked.shard_rank, marked.shard_count = sharding, tp.rank, tp.size
    if tp.size > 1:  # DeepSpeed reads these when it computes the gradient's norm
        marked.model_parallel = marked.tensor_model_parallel = True


def sharding_of(param: Tensor) -> Sharding | None:
    """The parameter's sharding; None if every rank holds all of it."""
    return getattr(param, "sharding", None)


def shardings_of(model: nn.Module) -> dict[str, Sharding]:
    """Parameter name -> sharding, for the sharded parameters."""
    found = {name: sharding_of(param) for name, param in model.named_parameters()}
    return {name: sharding for name, sharding in found.items() if sharding is not None}


def full_shape(param: Tensor) -> torch.Size:
    """Shape of the unsharded parameter."""
    if (sharding := sharding_of(param)) is None:
        return param.shape
    return sharding.full_shape(param.shape, cast(_Marked, param).shard_count)


def local_slice(param: Tensor, full: Tensor) -> Tensor:
    """The slice of `full` that belongs to this rank's `param`."""
    if (sharding := sharding_of(param)) is None:
        return full
    marked = cast(_Marked, param)
    return sharding.slice(full, marked.shard_rank, marked.shard_count)


def unsharded(param: Tensor, shard: Tensor, tp: TensorGroup) -> Tensor:
    """All-gather `shard` over `tp` and join the slices the way `param` is sharded."""
    sharding = sharding_of(param)
    return shard if sharding is None or tp.size == 1 else sharding.join(tp.gather(shard))
