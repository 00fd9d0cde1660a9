"""Collectives with their gradients, over a group of ranks.

A value is either the same on every rank of the group (S) or different on each (D). An inner product
counts an S value once and sums over the ranks of a D value; with these inner products the backward
pass of each collective is its adjoint.

    name            from  to   forward                            backward
    copy            S     D    x                                  sum over ranks
    reduce          D     S    sum over ranks                     dy
    gather          D     S    concatenate along a dimension      this rank's slice
    scatter         S     D    this rank's slice of a dimension   concatenate
    all_gather      D     D    concatenate along a dimension      reduce_scatter
    reduce_scatter  D     D    sum over ranks, this rank's slice  all_gather
    all_to_all      D     D    split one dimension, join another  all_to_all, dimensions exchanged
    share           S     D    x / size                           dy (where it is the same on all)

In a group of one each returns its input. `copy` precedes a column-parallel layer and `reduce`
follows a row-parallel one (Megatron-LM's f and g); under sequence parallelism `all_gather` and
`reduce_scatter` take their places. `share` is for a bias that every rank adds to its partial
result: the sum over the ranks then contains the bias once, and every rank gets its full gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron.parallel.groups import TensorGroup


def _same(x: Tensor, tp: TensorGroup) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, tp: TensorGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=tp.group)
    return total


def _slice(x: Tensor, tp: TensorGroup, dim: int) -> Tensor:
    return x.chunk(tp.size, dim)[tp.rank].contiguous()


def _join(x: Tensor, tp: TensorGroup, dim: int) -> Tensor:
    return torch.cat(tp.gather(x), dim)


def _sum_slice(x: Tensor, tp: TensorGroup, dim: int) -> Tensor:
    chunks = x.chunk(tp.size, dim)
    total = torch.empty_like(chunks[0], memory_format=torch.contiguous_format)
    dist.reduce_scatter_tensor(total, torch.cat(chunks), group=tp.group)
    return total


def _exchange(x: Tensor, tp: TensorGroup, split: int, join: int) -> Tensor:
    """Send chunk r of dimension `split` to rank r; join the received chunks along `join`."""
    chunks = torch.cat(x.chunk(tp.size, split))
    received = torch.empty_like(chunks)
    dist.all_to_all_single(received, chunks, group=tp.group)
    return torch.cat(received.chunk(tp.size), join)


def _exchange_back(x: Tensor, tp: TensorGroup, split: int, join: int) -> Tensor:
    return _exchange(x, tp, join, split)


def _divide(x: Tensor, tp: TensorGroup) -> Tensor:
    return x / tp.size


def _collective(
    forward: Callable[..., Tensor], backward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """A function of (x, group, *dimensions) with the given gradient; x itself in a group of one."""

    class Collective(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, tp: TensorGroup, *dims: int) -> Tensor:
            ctx.tp, ctx.dims = tp, dims
            return forward(x, tp, *dims)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
            return backward(dy, ctx.tp, *ctx.dims), None, *(None for _ in ctx.dims)

    def apply(x: Tensor, tp: TensorGroup, *dims: int) -> Tensor:
        return x if tp.size == 1 else Collective.apply(x, tp, *dims)

    return apply


copy_to = _collective(_same, _sum)
"""(x, group): `x`, whose gradient is summed over the group."""
reduce_from = _collective(_sum, _same)
"""(x, group): the sum of the group's partial `x`, on every rank."""
gather_from = _collective(_join, _slice)
"""(x, group, dim): the slices `x` joined; all ranks then compute the same with the result."""
scatter_to = _collective(_slice, _join)
"""(x, group, dim): this rank's slice of `x` along `dim`."""
all_gather = _collective(_join, _sum_slice)
"""(x, group, dim): the slices `x` joined; each rank may use the result differently."""
reduce_scatter = _collective(_sum_slice, _join)
"""(x, group, dim): this rank's slice along `dim` of the sum of the group's partial `x`."""
share_of = _collective(_divide, _same)
"""(x, group): `x` / size. The shares of all ranks, which hold the same `x`, sum to `x`."""
_all_to_all = _collective(_exchange, _exchange_back)


def all_to_all(x: Tensor, tp: TensorGroup, *, split: int, join: int) -> Tensor:
    """From slices along `join` to slices along `split` (Ulysses, arXiv 2309.14509)."""
    return _all_to_all(x, tp, split, join)


def enter_sharded(x_BTD: Tensor, tp: TensorGroup) -> Tensor:
    """Hidden states of all positions, the input of a layer that is sharded by outputs."""
    return all_gather(x_BTD, tp, 1) if tp.splits_sequence else copy_to(x_BTD, tp)


def leave_sharded(x_BTD: Tensor, tp: TensorGroup) -> Tensor:
    """The sum of partial hidden states; this rank's positions of it under sequence parallelism."""
    return reduce_scatter(x_BTD, tp, 1) if tp.splits_sequence else reduce_from(x_BTD, tp)


def add_partial(x: Tensor, *partial: Tensor, tp: TensorGroup) -> Tensor:
    """x + (the sum of the partial results over the group, with one reduction for all of them)."""
    first, *others = partial
    for each in others:
        first = first + each
    return x + leave_sharded(first, tp)
