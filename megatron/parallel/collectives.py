"""Collectives that autograd knows, over a tensor-parallel group (Megatron-LM's f and g).

    name      forward                       backward
    copy      x                             sum over ranks
    reduce    sum over ranks                dy
    gather    concatenate last dimension    own slice of dy
    scatter   own slice of last dimension   concatenate
    share     x / size                      dy

In a group of one each returns its input. `copy` stands before a layer that is cut by outputs,
`reduce` behind one that is cut by inputs. `share` is an equal part of a value that all ranks hold:
added to each rank's partial result it is counted once in their sum, and every rank has its whole
gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron.parallel.groups import TensorGroup


def _sum(x: Tensor, tp: TensorGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=tp.group)
    return total


def _slice(x: Tensor, tp: TensorGroup) -> Tensor:
    return x.chunk(tp.size, dim=-1)[tp.rank].contiguous()


def _join(x: Tensor, tp: TensorGroup) -> Tensor:
    return torch.cat(tp.gather(x), dim=-1)


class _Copy(Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return _sum(dy, ctx.tp), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx, x, tp):
        return _sum(x, tp)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class _Gather(Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return _join(x, tp)

    @staticmethod
    def backward(ctx, dy):
        return _slice(dy, ctx.tp), None


class _Scatter(Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return _slice(x, tp)

    @staticmethod
    def backward(ctx, dy):
        return _join(dy, ctx.tp), None


class _Share(Function):
    @staticmethod
    def forward(ctx, x, tp):
        return x / tp.size

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def copy_to(x: Tensor, tp: TensorGroup) -> Tensor:
    """`x`, whose gradient is summed over the group."""
    return x if tp.size == 1 else _Copy.apply(x, tp)


def reduce_from(x: Tensor, tp: TensorGroup) -> Tensor:
    """The sum of the group's partial `x`, on every rank."""
    return x if tp.size == 1 else _Reduce.apply(x, tp)


def gather_from(x: Tensor, tp: TensorGroup) -> Tensor:
    """The group's slices `x` joined along the last dimension."""
    return x if tp.size == 1 else _Gather.apply(x, tp)


def scatter_to(x: Tensor, tp: TensorGroup) -> Tensor:
    """This rank's slice of `x` along the last dimension."""
    return x if tp.size == 1 else _Scatter.apply(x, tp)


def share_of(x: Tensor, tp: TensorGroup) -> Tensor:
    """An equal part of `x`, which all ranks hold; the parts sum to `x`."""
    return x if tp.size == 1 else _Share.apply(x, tp)


def add_partial(x: Tensor, *partial: Tensor, tp: TensorGroup) -> Tensor:
    """x + (the sum of the partial results over the group, with one reduction for all of them)."""
    first, *others = partial
    for each in others:
        first = first + each
    return x + reduce_from(first, tp)
