"""Describe how a parameter is sharded over the tensor-parallel ranks.

A sharded parameter has a `Sharding` as an attribute. A parameter without a `Sharding` is the same
on every rank. Initial values are drawn for the full parameter and then sliced, so they do not
depend on the number of ranks. The slices in a checkpoint can be joined to the full parameter again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from megatron.parallel.groups import TensorGroup


@dataclass(frozen=True)
class Sharding:
    """How a parameter is split into equal slices, one for each tensor-parallel rank.

    Attributes:
        dim: The dimension that is split.
        blocks: The number of tensors that are stacked along `dim` and split separately. It is 2 for
            the value and the gate of a gated MLP.
    """

    dim: int
    blocks: int = 1

    def slice(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Return one of `size` equal slices of the full tensor, as a copy."""
        blocks = full.chunk(self.blocks, self.dim)
        slices = [block.chunk(size, self.dim)[rank] for block in blocks]
        return torch.cat(slices, self.dim).contiguous()

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """Return the full tensor, given the slices of all ranks in the order of ranks."""
        chunks = [each.chunk(self.blocks, self.dim) for each in slices]
        return torch.cat([each[b] for b in range(self.blocks) for each in chunks], self.dim)

    def full_shape(self, slice_shape: torch.Size, size: int) -> torch.Size:
        """Return the shape of the full tensor, given the shape of one of its `size` slices."""
        shape = list(slice_shape)
        shape[self.dim] *= size
        return torch.Size(shape)


class _Marked(nn.Parameter):
    """A parameter with the attributes that `mark_sharding` adds. Only type checkers need it."""

    sharding: Sharding
    shard_rank: int
    shard_count: int
    model_parallel: bool
    tensor_model_parallel: bool


def mark_sharding(param: Tensor, sharding: Sharding, tp: TensorGroup) -> None:
    """Set a parameter's attributes to describe how it is sharded over the ranks of `tp`."""
    marked = cast(_Marked, param)
    marked.sharding, marked.shard_rank, marked.shard_count = sharding, tp.rank, tp.size
    if tp.size > 1:  # DeepSpeed reads these two attributes when it computes the gradient norm
        marked.model_parallel = marked.tensor_model_parallel = True


def mark_fused(param: Tensor, rows: tuple[int, ...]) -> None:
    """Record on a parameter that its rows belong to several matrices, such as queries and keys.

    Args:
        rows: The number of rows of each matrix in one period. For example, (4, 2) means 4 rows of
            the first matrix, then 2 rows of the second matrix, then 4 rows of the first matrix
            again, and so on.
    """
    param.fused_rows = rows  # pyright: ignore[reportAttributeAccessIssue]


def fused_rows(param: Tensor) -> tuple[int, ...]:
    """Return the number of rows of each matrix that is stacked in `param`.

    If the rows of the matrices alternate, the numbers are those of one period. A parameter that is
    a single matrix has one entry, its number of rows.
    """
    return getattr(param, "fused_rows", (len(param),))


def sharding_of(param: Tensor) -> Sharding | None:
    """Return the parameter's `Sharding`, or None if every rank has the full parameter."""
    return getattr(param, "sharding", None)


def shardings_of(model: nn.Module) -> dict[str, Sharding]:
    """Return a dictionary from the name of each sharded parameter to its `Sharding`."""
    found = {name: sharding_of(param) for name, param in model.named_parameters()}
    return {name: sharding for name, sharding in found.items() if sharding is not None}


def full_shape(param: Tensor) -> torch.Size:
    """Return the shape that `param` would have without sharding."""
    if (sharding := sharding_of(param)) is None:
        return param.shape
    return sharding.full_shape(param.shape, cast(_Marked, param).shard_count)


def local_slice(param: Tensor, full: Tensor) -> Tensor:
    """Return this rank's slice of a full tensor. The slices are those of the parameter `param`."""
    if (sharding := sharding_of(param)) is None:
        return full
    marked = cast(_Marked, param)
    return sharding.slice(full, marked.shard_rank, marked.shard_count)


def unsharded(param: Tensor, shard: Tensor, tp: TensorGroup) -> Tensor:
    """Return the full tensor, joined from the slices on all ranks of `tp`.

    Args:
        param: A parameter that is sharded in the same way as the tensor.
        shard: This rank's slice of the tensor, such as the gradient of `param`.
    """
    sharding = sharding_of(param)
    return shard if sharding is None or tp.size == 1 else sharding.join(tp.gather(shard))
