"""Collectives that autograd knows, over a tensor-parallel group (Megatron-LM's f and g).

    name      forward                       backward
    copy      x                             sum over ranks
    reduce    sum over ranks                dy
    gather    concatenate a dimension       own slice of dy
    scatter   own slice of a dimension      concatenate
    collect   concatenate a dimension       sum over ranks, own slice of it
    spread    sum over ranks, own slice     concatenate
    share     x / size                      dy
    exchange  heads for positions           positions for heads

In a group of one each returns its input. `copy` stands before a layer that is cut by outputs,
`reduce` behind one that is cut by inputs; where the group cuts the sequence too, `collect` and
`spread` take their places. `share` is an equal part of a value that all ranks hold:
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


def _slice(x: Tensor, tp: TensorGroup, dim: int) -> Tensor:
    return x.chunk(tp.size, dim)[tp.rank].contiguous()


def _join(x: Tensor, tp: TensorGroup, dim: int) -> Tensor:
    return torch.cat(tp.gather(x), dim)


def _sum_slice(x: Tensor, tp: TensorGroup, dim: int) -> Tensor:
    parts = x.chunk(tp.size, dim)
    own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    dist.reduce_scatter_tensor(own, torch.cat(parts), group=tp.group)
    return own


def _swap(x: Tensor, tp: TensorGroup, cut: int, join: int) -> Tensor:
    """Part r of dimension `cut` to rank r, the parts that come in joined along `join`."""
    parts = torch.cat(x.chunk(tp.size, cut))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=tp.group)
    return torch.cat(received.chunk(tp.size), join)


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
    def forward(ctx, x, tp, dim):
        ctx.tp, ctx.dim = tp, dim
        return _join(x, tp, dim)

    @staticmethod
    def backward(ctx, dy):
        return _slice(dy, ctx.tp, ctx.dim), None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx, x, tp, dim):
        ctx.tp, ctx.dim = tp, dim
        return _slice(x, tp, dim)

    @staticmethod
    def backward(ctx, dy):
        return _join(dy, ctx.tp, ctx.dim), None, None


class _Collect(Function):
    @staticmethod
    def forward(ctx, x, tp, dim):
        ctx.tp, ctx.dim = tp, dim
        return _join(x, tp, dim)

    @staticmethod
    def backward(ctx, dy):
        return _sum_slice(dy, ctx.tp, ctx.dim), None, None


class _Spread(Function):
    @staticmethod
    def forward(ctx, x, tp, dim):
        ctx.tp, ctx.dim = tp, dim
        return _sum_slice(x, tp, dim)

    @staticmethod
    def backward(ctx, dy):
        return _join(dy, ctx.tp, ctx.dim), None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx, x, tp, cut, join):
        ctx.tp, ctx.cut, ctx.join = tp, cut, join
        return _swap(x, tp, cut, join)

    @staticmethod
    def backward(ctx, dy):
        return _swap(dy, ctx.tp, ctx.join, ctx.cut), None, None, None


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


def gather_from(x: Tensor, tp: TensorGroup, dim: int = -1) -> Tensor:
    """The group's slices `x` joined along `dim`, for what all ranks then do alike."""
    return x if tp.size == 1 else _Gather.apply(x, tp, dim)


def scatter_to(x: Tensor, tp: TensorGroup, dim: int = -1) -> Tensor:
    """This rank's slice of `x` along `dim`."""
    return x if tp.size == 1 else _Scatter.apply(x, tp, dim)


def collect_from(x: Tensor, tp: TensorGroup, dim: int) -> Tensor:
    """The group's slices `x` joined along `dim`, for what each rank then does in its own way."""
    return x if tp.size == 1 else _Collect.apply(x, tp, dim)


def enter_cut(x_BTD: Tensor, tp: TensorGroup) -> Tensor:
    """Hidden states, of all positions, before a layer that is cut by outputs."""
    return _Collect.apply(x_BTD, tp, 1) if tp.sequence else copy_to(x_BTD, tp)


def leave_cut(x_BTD: Tensor, tp: TensorGroup) -> Tensor:
    """The sum of partial hidden states; where `tp` cuts the sequence, this rank's positions."""
    return _Spread.apply(x_BTD, tp, 1) if tp.sequence else reduce_from(x_BTD, tp)


def exchange(x: Tensor, tp: TensorGroup, *, cut: int, join: int) -> Tensor:
    """From slices of dimension `join` to slices of dimension `cut` (Ulysses, arXiv 2309.14509)."""
    return x if tp.size == 1 else _Exchange.apply(x, tp, cut, join)


def share_of(x: Tensor, tp: TensorGroup) -> Tensor:
    """An equal part of `x`, which all ranks hold; the parts sum to `x`."""
    return x if tp.size == 1 else _Share.apply(x, tp)


def add_partial(x: Tensor, *partial: Tensor, tp: TensorGroup) -> Tensor:
    """x + (the sum of the partial results over the group, with one reduction for all of them)."""
    first, *others = partial
    for each in others:
        first = first + each
    return x + leave_cut(first, tp)
