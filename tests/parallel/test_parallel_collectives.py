"""Test that each collective's backward pass is its adjoint, on real ranks in float64.

A value is the same on every rank (S) or different on each (D); an inner product counts an S value
once and sums a D value over the ranks. See `megatron.parallel.collectives`.
"""

from __future__ import annotations

import pytest
import torch

from megatron.parallel.collectives import (
    add_partial,
    all_gather,
    all_to_all,
    copy_to,
    enter_sharded,
    gather_from,
    leave_sharded,
    reduce_from,
    reduce_scatter,
    scatter_to,
    share_of,
)
from megatron.parallel.groups import ALONE, Groups
from megatron.parallel.sequence import SequenceSplit
from tests.helpers.launch import run_ranks

WORLD = 4
SHAPE = (8, 12, 4)

COLLECTIVES = {
    "copy": (copy_to, "S", "D"),
    "reduce": (reduce_from, "D", "S"),
    **{f"gather {d}": (lambda x, tp, d=d: gather_from(x, tp, d), "D", "S") for d in (0, 1, -1)},
    **{f"scatter {d}": (lambda x, tp, d=d: scatter_to(x, tp, d), "S", "D") for d in (0, 1, -1)},
    **{f"all_gather {d}": (lambda x, tp, d=d: all_gather(x, tp, d), "D", "D") for d in (0, 1, 2)},
    **{
        f"reduce_scatter {d}": (lambda x, tp, d=d: reduce_scatter(x, tp, d), "D", "D")
        for d in (0, 1, 2)
    },
    **{
        f"all_to_all {split} {join}": (
            lambda x, tp, split=split, join=join: all_to_all(x, tp, split=split, join=join),
            "D",
            "D",
        )
        for split in range(3)
        for join in range(3)
        if split != join
    },
    "share": (share_of, "S", "sum"),
}


def draw(shape, rank, kind, seed=0):
    """Draw a float64 tensor, which is different on each rank if `kind` is D."""
    generator = torch.Generator().manual_seed(1000 * seed + (rank if kind == "D" else 99))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def inner(a, b, kind, group):
    """Return the inner product <a, b>, summed over the ranks if the values differ (D)."""
    product = (a * b).sum()
    return product if kind == "S" else torch.stack(group.gather(product)).sum()


def measure(groups: Groups):
    """Return, on each rank, each collective's value, gradient and both inner products."""
    tp = groups.divided(model_size=WORLD).model
    pairs = groups.divided(model_size=2, context_size=2, sequence_parallel=True)
    found = {"order": [int(x) for x in tp.gather(torch.tensor(groups.rank))]}
    for name, (function, start, end) in COLLECTIVES.items():
        x = draw(SHAPE, tp.rank, start).requires_grad_()
        out = function(x, tp)
        # the gradient of a shared value's share is that of the sum: the same on every rank
        y = draw(out.shape, tp.rank, "S" if end == "sum" else end, seed=1)
        (dx,) = torch.autograd.grad(out, x, y)
        left = inner(out, y, "D" if end == "sum" else end, tp)
        right = inner(x, dx, start, tp)
        found[name] = out.detach(), dx, left.item(), right.item(), y
    return found | sequence_checks(pairs)


def sequence_checks(groups: Groups):
    """Return results of entering and leaving a sharded layer under sequence parallelism."""
    tp, cp = groups.model, groups.context
    split = SequenceSplit(tp, cp)
    tokens_BT = torch.arange(22).view(2, 11)
    local_BT = split.context_slice(tokens_BT)
    positions_T = split.positions(local_BT.shape[1] // tp.size, torch.device("cpu"))
    x = draw((2, 4, 3), groups.rank, "D").requires_grad_()
    entered = enter_sharded(x, tp)
    (dx,) = torch.autograd.grad(entered, x, torch.ones_like(entered))
    left = leave_sharded(entered, tp)
    total = add_partial(x, entered, entered, tp=tp)
    return {
        "tokens": local_BT,
        "positions": positions_T.tolist(),
        "entered": entered.detach(),
        "entered gradient": dx,
        "left": left.detach() - tp.size * x.detach(),
        "added": total.detach() - (1 + 2 * tp.size) * x.detach(),
        "tensor group": [int(n) for n in tp.gather(torch.tensor(groups.rank))],
    }


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(WORLD, measure)


def test_gathered_values_are_in_the_order_of_ranks(ranks):
    assert all(found["order"] == list(range(WORLD)) for found in ranks)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_gradient_is_the_adjoint(ranks, name):
    """<f(x), y> equals <x, f*(y)>, where f* is the backward pass."""
    for found in ranks:
        _, _, left, right, _ = found[name]
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12)
        assert (left, right) == pytest.approx(ranks[0][name][2:4], rel=1e-12)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_values_are_those_of_one_process(ranks, name):
    kind, *dims = name.split()
    dims = [int(dim) for dim in dims]
    inputs = [draw(SHAPE, rank, COLLECTIVES[name][1]) for rank in range(WORLD)]
    total = sum(inputs)
    for rank, found in enumerate(ranks):
        expected = {
            "copy": lambda rank=rank: inputs[rank],
            "reduce": lambda: total,
            "gather": lambda: torch.cat(inputs, *dims),
            "scatter": lambda rank=rank: inputs[rank].chunk(WORLD, *dims)[rank],
            "all_gather": lambda: torch.cat(inputs, *dims),
            "reduce_scatter": lambda rank=rank: total.chunk(WORLD, *dims)[rank],
            "all_to_all": lambda rank=rank: torch.cat(
                [x.chunk(WORLD, dims[0])[rank] for x in inputs], dims[1]
            ),
            "share": lambda rank=rank: inputs[rank] / WORLD,
        }[kind]()
        torch.testing.assert_close(found[name][0], expected, rtol=1e-14, atol=1e-14)
        assert found[name][0].is_contiguous() and found[name][1].shape == SHAPE


@pytest.mark.parametrize("name", COLLECTIVES)
def test_gradients_are_those_of_one_process(ranks, name):
    """The reference is the same function of all ranks' inputs, in one process."""
    kind, *dims = name.split()
    dims = [int(dim) for dim in dims]
    same = COLLECTIVES[name][1] == "S"
    inputs = [draw(SHAPE, rank, COLLECTIVES[name][1]).requires_grad_() for rank in range(WORLD)]
    if same:
        inputs = [inputs[0]] * WORLD
    total = sum(inputs)
    outputs = {
        "copy": lambda: inputs,
        "reduce": lambda: [total],
        "gather": lambda: [torch.cat(inputs, *dims)],
        "scatter": lambda: inputs[0].chunk(WORLD, *dims),
        "all_gather": lambda: [torch.cat(inputs, *dims)] * WORLD,
        "reduce_scatter": lambda: total.chunk(WORLD, *dims),
        "all_to_all": lambda: [
            torch.cat([x.chunk(WORLD, dims[0])[rank] for x in inputs], dims[1])
            for rank in range(WORLD)
        ],
        "share": lambda: [x / WORLD for x in inputs],
    }[kind]()
    loss = sum((out * found[name][4]).sum() for out, found in zip(outputs, ranks, strict=False))
    loss.backward()
    for rank, found in enumerate(ranks):
        torch.testing.assert_close(found[name][1], inputs[rank].grad, rtol=1e-13, atol=1e-13)


def test_a_layer_is_entered_with_all_positions_and_left_with_the_ranks_own(ranks):
    """There are two tensor-parallel groups, ranks 0 and 1, and ranks 2 and 3."""
    for rank, found in enumerate(ranks):
        first = rank // 2 * 2
        inputs = [draw((2, 4, 3), each, "D") for each in (first, first + 1)]
        assert found["tensor group"] == [first, first + 1]
        assert torch.equal(found["entered"], torch.cat(inputs, 1))
        assert torch.equal(found["entered gradient"], torch.full((2, 4, 3), 2.0).double())
        torch.testing.assert_close(found["left"], torch.zeros(2, 4, 3).double(), atol=1e-14, rtol=0)
        torch.testing.assert_close(
            found["added"], torch.zeros(2, 4, 3).double(), atol=1e-14, rtol=0
        )


def test_positions_are_split_by_context_and_then_by_tensor_rank(ranks):
    """11 tokens are padded to 12: two context slices of 6 with two ranks of 3 positions each."""
    padded_BT = torch.nn.functional.pad(torch.arange(22).view(2, 11), (0, 1))
    assert [found["positions"] for found in ranks] == [
        [0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11],
    ]  # fmt: skip
    for rank, found in enumerate(ranks):
        assert torch.equal(found["tokens"], padded_BT.split(6, 1)[rank // 2])


def test_in_a_group_of_one_every_collective_returns_its_input():
    x = torch.randn(SHAPE)
    for function, _, _ in COLLECTIVES.values():
        assert function(x, ALONE) is x
    assert enter_sharded(x, ALONE) is x and leave_sharded(x, ALONE) is x
