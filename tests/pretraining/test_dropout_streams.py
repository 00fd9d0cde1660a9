"""Each rank of each seed draws dropout from a stream of its own."""

import pytest
import torch

from megatron.config import load_config
from megatron.pretraining.run import Job
from tests.helpers.jobs import write_config, write_shards
from tests.helpers.launch import run_ranks


def first_masks(groups, folder, prefix, seeds):
    """Return the first dropout mask of each seed's job on this rank."""
    masks = []
    for seed in seeds:
        config = folder / f"{groups.rank} {seed}.yml"
        write_config(config, prefix, seed=seed, train_batch_size=2, save=str(folder / str(seed)))
        Job(load_config([config], world_size=groups.world_size), groups)
        masks.append(torch.nn.functional.dropout(torch.ones(256), 0.5).tolist())
    return masks


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    return run_ranks(2, first_masks, folder, write_shards(folder), [7, 8, 7])


def test_no_rank_of_one_seed_draws_the_masks_of_another_seed(masks):
    first, second = masks
    assert len({tuple(mask) for mask in (*first[:2], *second[:2])}) == 4


def test_the_same_seed_draws_the_same_masks(masks):
    assert all(rank[0] == rank[2] for rank in masks)
