"""Test `Sharding`: joining is the inverse of slicing, also with several blocks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron.parallel.groups import ALONE, TensorGroup
from megatron.parallel.sharding import (
    Sharding,
    full_shape,
    local_slice,
    mark_sharding,
    sharding_of,
    shardings_of,
    unsharded,
)


@st.composite
def sharded(draw):
    """Draw (sharding, number of ranks, full tensor whose size is divisible by it)."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    blocks, size = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    shape[dim] *= blocks * size
    return Sharding(dim, blocks), size, torch.randn(shape)


@given(sharded())
def test_join_is_the_inverse_of_slice(case):
    sharding, size, full = case
    slices = [sharding.slice(full, rank, size) for rank in range(size)]
    assert torch.equal(sharding.join(slices), full)
    for each in slices:
        assert each.is_contiguous() and sharding.full_shape(each.shape, size) == full.shape
        assert each.data_ptr() != full.data_ptr()


@given(sharded())
def test_every_rank_holds_its_range_of_each_block(case):
    sharding, size, full = case
    length = full.shape[sharding.dim] // (sharding.blocks * size)
    for rank in range(size):
        starts = [(block * size + rank) * length for block in range(sharding.blocks)]
        indices = torch.tensor([start + i for start in starts for i in range(length)])
        expected = full.index_select(sharding.dim, indices)
        assert torch.equal(sharding.slice(full, rank, size), expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_marked_parameter_knows_its_slice_and_its_full_shape(size):
    full = torch.randn(8, 3)
    for rank in range(size):
        tp = TensorGroup(None, rank, size)
        param = nn.Parameter(Sharding(0).slice(full, rank, size))
        mark_sharding(param, Sharding(0), tp)
        assert sharding_of(param) == Sharding(0) and full_shape(param) == full.shape
        assert torch.equal(local_slice(param, full), param)
        # DeepSpeed adds up the norms of parameters with these marks over the ranks.
        assert getattr(param, "model_parallel", False) == (size > 1)
        assert getattr(param, "tensor_model_parallel", False) == (size > 1)


def test_an_unmarked_parameter_is_its_own_slice():
    param, full = nn.Parameter(torch.zeros(2, 3)), torch.ones(2, 3)
    assert sharding_of(param) is None and full_shape(param) == full.shape
    assert local_slice(param, full) is full
    assert unsharded(param, full, TensorGroup(None, 1, 2)) is full  # no collective


def test_shardings_are_listed_by_parameter_name():
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    mark_sharding(model[1].weight, Sharding(1), ALONE)
    assert shardings_of(model) == {"1.weight": Sharding(1)}
    assert unsharded(model[1].weight, model[1].weight, ALONE) is model[1].weight
