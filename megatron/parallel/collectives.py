"""Implement differentiable collectives over a group of ranks.

A value is either the same on every rank of the group (S) or different on each rank (D). The
backward pass f* of each collective is the adjoint of its forward pass f: <f(x), y> = <x, f*(y)>.
Inner products of D values are summed over the ranks. Inner products of S values are not. In the
table, `from` and `to` are the kinds (S or D) of the input x and of the output, dy is the gradient
of the output, and size is the number of ranks.

    name            from  to   forward                            backward
    copy            S     D    x                                  sum over ranks
    reduce          D     S    sum over ranks                     dy
    gather          D     S    concatenate along a dimension      this rank's slice
    scatter         S     D    this rank's slice of a dimension   concatenate
    all_gather      D     D    concatenate along a dimension      reduce_scatter
    reduce_scatter  D     D    sum over ranks, this rank's slice  all_gather
    all_to_all      D     D    split one dimension, join another  all_to_all, dimensions exchanged
    share           S     D    x / size                           dy

In a group of one rank, each collective returns its input. `copy` precedes a column-parallel layer,
and `reduce` follows a row-parallel layer (Megatron-LM's f and g). Under sequence parallelism,
`all_gather` replaces `copy`, and `reduce_scatter` replaces `reduce`. `share` is for a bias that
every rank adds to its partial result. The sum over the ranks then contains the bias once, and every
rank gets the full gradient of the bias. The backward pass of `share` requires that dy is the same
on all ranks. This holds if `reduce` or `reduce_scatter` follows.
"""

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
    """Send one piece of a tensor to each rank, and return the received pieces, joined.

    Piece r goes to rank r.

    Args:
        x: The tensor.
        tp: The group of ranks.
        split: The dimension along which the tensor is cut into pieces.
        join: The dimension along which the received pieces are joined.
    """
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
    """Return a collective that is differentiable in a tensor x.

    Args:
        forward: The function that computes the result from (x, group, *dimensions).
        backward: The function that computes the gradient of x from (gradient of the result, group,
            *dimensions).
    """

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
"""Takes (x, group). Returns `x` unchanged. The backward pass sums the gradient over the group."""
reduce_from = _collective(_sum, _same)
"""Takes (x, group). Returns the sum of all ranks' partial tensors `x`, on every rank."""
gather_from = _collective(_join, _slice)
"""Takes (x, group, dim). Returns the slices `x` of all ranks, joined along `dim`.

All ranks must use the result in the same way. Otherwise use `all_gather`."""
scatter_to = _collective(_slice, _join)
"""Takes (x, group, dim). Returns this rank's slice of `x` along `dim`."""
all_gather = _collective(_join, _sum_slice)
"""Takes (x, group, dim). Returns the slices `x` of all ranks, joined along `dim`.

Each rank may use the result differently, because the backward pass sums the ranks' gradients."""
reduce_scatter = _collective(_sum_slice, _join)
"""Takes (x, group, dim). Sums all ranks' partial tensors `x`, and returns this rank's slice of the
sum along `dim`."""
share_of = _collective(_divide, _same)
"""Takes (x, group). Returns `x` divided by the number of ranks.

All ranks must hold the same `x`, so that the sum of the results over all ranks is `x`. All ranks
must also get the same gradient of the result."""
_all_to_all = _collective(_exchange, _exchange_back)


def all_to_all(x: Tensor, tp: TensorGroup, *, split: int, join: int) -> Tensor:
    """Return a tensor split over the ranks along the dimension `split` instead of `join`.

    This is the exchange of Ulysses (arXiv 2309.14509).

    Args:
        x: A tensor with this rank's slice of the dimension `join`, and all of the dimension
            `split`.
        tp: The group of ranks.
        split: The dimension of which the result has only this rank's slice.
        join: The dimension of which the result has all slices.
    """
    return _all_to_all(x, tp, split, join)


def enter_sharded(x_BTD: Tensor, tp: TensorGroup) -> Tensor:
    """Return the hidden states of all positions, as the input of a column-parallel layer.

    Under sequence parallelism, `x_BTD` has only this rank's positions. The backward pass sums the
    gradients of all ranks.
    """
    return all_gather(x_BTD, tp, 1) if tp.splits_sequence else copy_to(x_BTD, tp)


def leave_sharded(x_BTD: Tensor, tp: TensorGroup) -> Tensor:
    """Return the sum of all ranks' partial hidden states.

    Under sequence parallelism, each rank gets the sum at its own positions only.
    """
    return reduce_scatter(x_BTD, tp, 1) if tp.splits_sequence else reduce_from(x_BTD, tp)


def add_partial(x: Tensor, *partial: Tensor, tp: TensorGroup) -> Tensor:
    """Return `x` plus the sum of the tensors `partial` over all ranks of `tp`."""
    first, *others = partial
    for each in others:
        first = first + each
    # Under sequence parallelism, `x` and the result have only this rank's positions.
    return x + leave_sharded(first, tp)
