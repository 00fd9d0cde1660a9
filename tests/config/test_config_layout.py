"""Test which degrees of parallelism are allowed, and the message for each refused layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize(
    ("text", "world", "data"),
    [
        ("model_parallel_size: 2", 2, 1),
        ("model_parallel_size: 2", 8, 4),
        ("model_parallel_size: 2\npipe_parallel_size: 2", 8, 2),
        ("model_parallel_size: 0\npipe_parallel_size: 0", 3, 3),
        ("model_parallel_size: 4\nactivation: geglu\nhidden_size: 48", 4, 1),
        ("model_parallel_size: 4\nactivation: geglu\nmlp_multiple_of: 4", 4, 1),
        ("context_parallel_size: 2\nmodel_parallel_size: 2\nsequence_parallel: true", 8, 2),
        ("context_parallel_size: 4\nnum_kv_heads: 1", 8, 2),  # ranks hold copies of a key head
        ("context_parallel_size: 2\nmodel_parallel_size: 2\nnum_kv_heads: 2", 4, 1),
        ("sequence_parallel: true", 1, 1),  # one rank has all positions
    ],
)
def test_the_data_parallel_size_is_what_is_left(
    load: Callable, text: str, world: int, data: int
) -> None:
    parallel = load(text, world_size=world).parallel
    assert parallel.data_parallel_size == data
    assert parallel.model_parallel_size >= 1 and parallel.pipe_parallel_size >= 1


@pytest.mark.parametrize(
    ("text", "world", "says"),
    [
        (
            "model_parallel_size: 2",
            3,
            "3 process(es) cannot form groups of pipe_parallel_size 1 x model_parallel_size 2 = 2; "
            "start a multiple of 2, e.g. torchrun --nproc-per-node 2 train.py",
        ),
        ("pipe_parallel_size: 64", 64, "64 stages are more than num_layers 2"),
        *(
            (f"pipe_parallel_size: 2\nzero_optimization: {{stage: {stage}}}", 2, says)
            for stage, says in {
                0: "DeepSpeed clips the gradients of each stage by themselves; write stage: 1, or",
                2: "2 with pipe_parallel_size 2: ZeRO-2 shards gradients to which a pipeline still",
                3: "3 with pipe_parallel_size 2: ZeRO-3 shards parameters that a pipeline",
            }.items()
        ),
        ("model_parallel_size: 3", 3, "3 does not divide num_attention_heads 4; write"),
        (
            "model_parallel_size: 2\noptimizer: {type: Muon}",
            2,
            "muon needs whole matrices, and model_parallel_size 2 divides them among processes; "
            "write model_parallel_size: 1, or type: adam",
        ),
        (
            "model_parallel_size: 4\nactivation: geglu\nhidden_size: 64",
            4,
            "4 does not divide the inner width 170 of the MLP (geglu); write mlp_multiple_of: 4",
        ),
        ("model_parallel_size: two", 2, "write 1 for none"),
        (
            "context_parallel_size: 2\nmodel_parallel_size: 2",
            6,
            "6 process(es) cannot form groups of pipe_parallel_size 1 x model_parallel_size 2 x "
            "context_parallel_size 2 = 4; start a multiple of 4",
        ),
        (
            "context_parallel_size: 2\npipe_parallel_size: 2",
            4,
            "2 with pipe_parallel_size 2: pipeline stages need the full sequence; write 1 for one",
        ),
        (
            "context_parallel_size: 4\nmodel_parallel_size: 2",
            8,
            "4 x model_parallel_size 2 does not divide num_attention_heads 4; write a product",
        ),
        (
            "context_parallel_size: 2\nmodel_parallel_size: 2\nsequence_parallel: true\n"
            "seq_length: 30",
            4,
            "30 cannot be split into context_parallel_size 2 x model_parallel_size 2 "
            "(sequence_parallel) = 4 equal shards; write e.g. 32",
        ),
        ("context_parallel_size: 2\nseq_length: 31", 2, "context_parallel_size 2 = 2 equal shards"),
    ],
)
def test_a_refused_layout_says_what_to_write(
    problems: Callable, text: str, world: int, says: str
) -> None:
    lines = problems(text, world_size=world)
    assert any(says in line for line in lines), lines
