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


_copy, _reduce = _collective(_same, _sum), _collective(_sum, _same)
_gather, _scatter = _collective(_join, _slice), _collective(_slice, _join)
_all_gather, _reduce_scatter = _collective(_join, _sum_slice), _collective(_sum_slice, _join)
_all_to_all, _share = _collective(_exchange, _exchange_back), _collective(_divide, _same)


def copy_to(x: Tensor, tp: TensorGroup) -> Tensor:
    """`x`, whose gradient is summed over the group."""
    return _copy(x, tp)


def reduce_from(x: Tensor, tp: TensorGroup) -> Tensor:
    """The sum of the group's partial `x`, on every rank."""
    return _reduce(x, tp)


def gather_from(x: Tensor, tp: TensorGroup, dim: int = -1) -> Tensor:
    """The ranks' slices `x` joined along `dim`; all ranks then compute the same with the result."""
    return _gather(x, tp, dim)


def scatter_to(x: Tensor, tp: TensorGroup, dim: int = -1) -> Tensor:
    """This rank's slice of `x` along `dim`."""
    return _scatter(x, tp, dim)


def all_gather(x: Tensor, tp: TensorGroup, dim: int) -> Tensor:
    """The ranks' slices `x` joined along `dim`; each rank may use the result differently."""
    return _all_gather(x, tp, dim)


def reduce_scatter(x: Tensor, tp: TensorGroup, dim: int) -> Tensor:
    """This rank's slice along `dim` of the sum of the group's partial `x`."""
    return _reduce_scatter(x, tp, dim)


def all_to_all(x: Tensor, tp: TensorGroup, *, split: int, join: int) -> Tensor:
    """From slices along `join` to slices along `split` (Ulysses, arXiv 2309.14509)."""
    return _all_to_all(x, tp, split, join)


def share_of(x: Tensor, tp: TensorGroup) -> Tensor:
    """`x` / size: the shares of all ranks, which hold the same `x`, sum to `x`."""
    return _share(x, tp)


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
