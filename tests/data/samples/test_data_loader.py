"""Test the loader: published batches, resuming, an order that does not depend on ranks."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.errors import DataExhausted
from megatron.data.samples.dataset import TokenDataset
from megatron.data.samples.loader import TrainLoader, published_start, sample_counts
from megatron.data.samples.split import SPLITS, split_documents

CASES = ("train_resume0", "train_resume17", "extrapolation_eval_512", "extrapolation_eval_256")


@pytest.fixture(scope="module")
def dataset(published_shards) -> TokenDataset:
    return TokenDataset(published_shards, (0, 60), 400, 48, 7, "train")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("case", CASES)
def test_published_iterators(parity, published_shards, case, split):
    run = json.loads((parity / "iterators.json").read_text())[case]
    counts = sample_counts(
        run["train_iters"], run["eval_interval"], run["eval_iters"], run["train_batch_size"]
    )
    at = SPLITS.index(split)
    dataset = TokenDataset(
        published_shards,
        split_documents(run["split"], len(published_shards))[at],
        counts[at],
        run["seq" if split == "train" else "seq_val"],
        run["seed"],
        split,
    )
    loader = TrainLoader(dataset, run["bs"], run["bs"])
    every, iters = run["eval_interval"], run["eval_iters"]
    start = published_start(loader, split, run["iteration"], eval_interval=every, eval_iters=iters)
    loader.consumed_samples = start
    published = run[split]["batches_left"]
    assert published == (dataset.published_length - start) // run["bs"]
    assert loader.batches_left - published in (0, 1)  # never one short of what was asked for
    batches = np.stack([next(loader) for _ in range(published)])
    first = np.load(parity / "iterators.npz")[f"{case}/{split}"]
    np.testing.assert_array_equal(batches[: len(first)], first)
    digest = hashlib.sha256(batches.astype("<i8").tobytes()).hexdigest()
    assert digest == run[split]["sha256_all"]


def global_batches(dataset, global_batch, micro_batch, dp_size, steps, consumed=0):
    """Return [steps, global_batch, T], the micro-batches of all ranks in the order of ranks."""
    loaders = [
        TrainLoader(dataset, global_batch, micro_batch, rank, dp_size, consumed)
        for rank in range(dp_size)
    ]
    batches = []
    for _ in range(steps):
        micro_steps = [
            np.concatenate([next(loader) for loader in loaders])
            for _ in range(loaders[0].micro_steps)
        ]
        batches.append(np.concatenate(micro_steps))
    assert {loader.consumed_samples for loader in loaders} == {consumed + steps * global_batch}
    return np.stack(batches)


@given(
    micro=st.integers(1, 4),
    dp=st.integers(1, 4),
    gas=st.integers(1, 3),
    consumed=st.integers(0, 200),
    data=st.data(),
)
def test_order_does_not_depend_on_the_division_of_work(dataset, micro, dp, gas, consumed, data):
    global_batch = micro * dp * gas
    divisions = [
        (m, d)
        for m in range(1, global_batch + 1)
        for d in range(1, global_batch + 1)
        if global_batch % (m * d) == 0
    ]
    other_micro, other_dp = data.draw(st.sampled_from(divisions))
    one = global_batches(dataset, global_batch, micro, dp, 2, consumed)
    other = global_batches(dataset, global_batch, other_micro, other_dp, 2, consumed)
    np.testing.assert_array_equal(one, other)
    expected = dataset.batch(range(consumed, consumed + 2 * global_batch))
    np.testing.assert_array_equal(one.reshape(expected.shape), expected)


@given(steps=st.integers(0, 12), micro=st.integers(1, 5), dp=st.integers(1, 3))
def test_resuming_is_skipping(dataset, steps, micro, dp):
    for rank in range(dp):
        unbroken = TrainLoader(dataset, micro * dp, micro, rank, dp)
        for _ in range(steps):
            next(unbroken)
        resumed = TrainLoader(dataset, micro * dp, micro, rank, dp, unbroken.consumed_samples)
        np.testing.assert_array_equal(next(resumed), next(unbroken))


def test_rank_reads_its_rows(dataset):
    """In each micro-step, rank r reads the rows r * micro to (r + 1) * micro - 1 of the block."""
    loader = TrainLoader(dataset, global_batch=12, micro_batch=2, dp_rank=1, dp_size=3)
    assert loader.micro_steps == 2 and iter(loader) is loader
    for first in (2, 8, 14):
        batch = next(loader)
        assert batch.dtype == np.int64 and batch.shape == (2, 49)
        np.testing.assert_array_equal(batch, dataset.batch([first, first + 1]))


def test_the_end_is_an_error_and_the_position_stays(dataset):
    loader = TrainLoader(dataset, 16, 16, consumed_samples=len(dataset) - 20)
    next(loader)
    at = loader.consumed_samples
    for _ in range(2):
        with pytest.raises(DataExhausted, match=f"{at} of {len(dataset)} .* larger extend_to"):
            next(loader)
    assert loader.consumed_samples == at and loader.batches_left == 0


@pytest.mark.parametrize("num_samples", range(1, 40, 3))
def test_enough_samples_for_what_was_asked(make_shards, num_samples):
    """GPT-NeoX's loader ends one sample early if the index has exactly the requested number."""
    shards = make_shards([range(9)] * 5)
    data = TokenDataset(shards, (0, 5), num_samples, 4, 0, "train")
    loader = TrainLoader(data, 1, 1)
    for _ in range(num_samples):
        next(loader)


def test_published_positions(dataset):
    """With gradient accumulation, GPT-NeoX's validation position mistakes micro-steps for steps."""
    common = {"eval_interval": 10, "eval_iters": 3}
    plain, twice = (TrainLoader(dataset, size, 4, dp_size=2) for size in (8, 16))
    assert sample_counts(40, 10, 3, 8) == (320, 120, 24)
    assert sample_counts(0, 1000, 32, 1) == (0, 32, 32)
    assert published_start(plain, "train", 17, **common) == 17 * 8
    assert published_start(twice, "train", 17, **common) == 34 * 8
    assert published_start(plain, "valid", 17, **common) == 3 * 8
    assert published_start(twice, "valid", 17, **common) == 9 * 8
    assert published_start(plain, "test", 17, **common) == 0
    in_all = dataset.published_length // 8
    assert published_start(plain, "train", in_all + 5, **common) == 5 * 8
