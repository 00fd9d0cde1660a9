"""Degrees of parallelism: what they divide, and what each refused layout is told."""

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
        ("pipe_parallel_size: 64", 64, "64 stages cannot share out num_layers "),
        *(
            (f"pipe_parallel_size: 2\nzero_optimization: {{stage: {stage}}}", 2, says)
            for stage, says in {
                0: "DeepSpeed clips each stage of a pipeline by itself; write stage: 1, or",
                2: "2 with pipe_parallel_size 2: ZeRO-2 cuts gradients that a pipeline still adds",
                3: "3 with pipe_parallel_size 2: ZeRO-3 cuts parameters that a pipeline already",
            }.items()
        ),
        ("model_parallel_size: 3", 3, "num_attention_heads 4 out evenly; write a divisor of 4"),
        (
            "model_parallel_size: 4\nmake_vocab_size_divisible_by: 6",
            4,
            "6 is not a multiple of model_parallel_size 4, and the padded vocabulary does not "
            "depend on the layout; write e.g. 12",
        ),
        (
            "model_parallel_size: 4\nactivation: geglu\nhidden_size: 64",
            4,
            "int(8/3 x hidden_size 64) = 170 evenly; write another hidden_size, or activation",
        ),
        ("model_parallel_size: two", 2, "write 1 for none"),
    ],
)
def test_a_refused_layout_says_what_to_write(
    problems: Callable, text: str, world: int, says: str
) -> None:
    lines = problems(text, world_size=world)
    assert any(says in line for line in lines), lines
