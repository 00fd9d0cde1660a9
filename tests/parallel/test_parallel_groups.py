"""Test `Groups.divided`: the members of each group, in order, for layouts of up to 8 ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from megatron.parallel.groups import Groups

LAYOUTS = [
    (world, pipe, context, model)
    for world in range(1, 9)
    for pipe, context, model in itertools.product(range(1, world + 1), repeat=3)
    if world % (pipe * context * model) == 0
]
NAMES = ("pipe", "data", "context", "model")


@pytest.fixture
def created(monkeypatch):
    """Replace process groups by lists of ranks, and collect all that are created."""
    groups = []

    def new_group(ranks, timeout=None):
        groups.append(ranks)
        return ranks

    monkeypatch.setattr(dist, "new_group", new_group)
    return groups


def divided(world, rank, pipe, context, model, **options):
    groups = Groups(rank, world, None, rank, world, torch.device("cpu"))
    return groups.divided(pipe_size=pipe, context_size=context, model_size=model, **options)


def expected_members(layout, rank, *varied):
    """Return the ranks that differ from `rank` only in the coordinates `varied`, in order."""
    world, pipe, context, model = layout
    sizes = (pipe, world // (pipe * context * model), context, model)
    by_rank = list(itertools.product(*map(range, sizes)))
    return [
        other
        for other, coordinates in enumerate(by_rank)
        if all(
            coordinates[axis] == by_rank[rank][axis]
            for axis, name in enumerate(NAMES)
            if name not in varied
        )
    ]


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if max(each[1:]) > 1], ids=str)
def test_every_rank_is_in_the_groups_of_its_coordinates(created, layout):
    world, pipe, context, model = layout
    creations = []
    for rank in range(world):
        created.clear()
        groups = divided(world, rank, pipe, context, model)
        creations.append(list(created))
        assert groups.model.group == expected_members(layout, rank, "model")
        assert groups.context.group == expected_members(layout, rank, "context")
        assert groups.data == expected_members(layout, rank, "data")
        assert groups.replicas == expected_members(layout, rank, "data", "context")
        stages = expected_members(layout, rank, "pipe")
        assert groups.pipe == (stages if pipe > 1 else None)
        # Positions count in the order of the ranks of a group.
        assert groups.model.group[groups.model.rank] == rank
        assert groups.context.group[groups.context.rank] == rank
        assert groups.data[groups.data_rank] == rank
        assert groups.replicas[groups.replica_rank] == rank
        assert stages[groups.pipe_rank] == rank
        sizes = groups.pipe_size, groups.context.size, groups.model.size
        assert sizes == (pipe, context, model)
        assert groups.replica_size == groups.data_size * context == world // (pipe * model)
        assert (groups.rank, groups.world_size) == (rank, world)
    # torch requires every rank to create the same groups in the same order
    assert all(each == creations[0] for each in creations)


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if max(each[1:]) > 1], ids=str)
def test_the_groups_of_a_kind_contain_every_rank_exactly_once(created, layout):
    world, pipe, context, model = layout
    everyone = [divided(world, rank, pipe, context, model) for rank in range(world)]
    kinds = {
        "model": [groups.model.group for groups in everyone],
        "context": [groups.context.group for groups in everyone],
        "data": [groups.data for groups in everyone],
        "replicas": [groups.replicas for groups in everyone],
        "pipe": [groups.pipe or [groups.rank] for groups in everyone],
    }
    for kind, found in kinds.items():
        distinct = {tuple(ranks) for ranks in found}
        assert sorted(itertools.chain(*distinct)) == list(range(world)), kind


def test_one_rank_for_each_replica_needs_no_groups(created):
    groups = Groups(2, 4, None, 2, 4, torch.device("cpu"))
    assert groups.divided() is groups and created == []


def test_only_the_tensor_group_splits_the_sequence_and_only_on_request(created):
    for asked in (False, True):
        groups = divided(4, 0, 1, 2, 2, sequence_parallel=asked)
        assert groups.model.splits_sequence == asked
        assert not groups.context.splits_sequence
    # a group of one has nothing to split
    assert not divided(2, 0, 1, 2, 1, sequence_parallel=True).model.splits_sequence


@pytest.mark.parametrize(("world", "sizes"), [(6, (1, 1, 4)), (4, (2, 3, 1)), (2, (2, 1, 2))])
def test_a_world_that_the_sizes_do_not_divide_is_refused(created, world, sizes):
    with pytest.raises(ValueError, match="cannot reshape"):
        divided(world, 0, *sizes)
    assert created == []
