"""Test train_batch_size = micro x accumulation x data-parallel size: derived, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.derived import derive

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(
    ("given", "world", "derived"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, 2, (8, 4, 1)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}, 2, (24, 4, 3)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}, 2, (24, 4, 3)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, 2, (24, 4, 3)),
        ({"train_batch_size": 24}, 2, (24, 12, 1)),
        (dict(zip(SIZES, (24, 4, 3), strict=True)), 2, (24, 4, 3)),
    ],
)
def test_derivation(load: Callable, given: dict, world: int, derived: tuple) -> None:
    lines = {"train_micro_batch_size_per_gpu": "null", **given}
    config = load("\n".join(f"{key}: {value}" for key, value in lines.items()), world_size=world)
    assert tuple(getattr(config.batch, name) for name in SIZES) == derived
    assert (config.parallel.world_size, config.parallel.data_parallel_size) == (world, world)


def test_the_product_is_spelled_out(problems: Callable) -> None:
    text = "train_batch_size: 30\ngradient_accumulation_steps: 2"
    (line,) = problems(text, world_size=3)
    assert line == (
        "over.yml:1: train_batch_size: 30 is not train_micro_batch_size_per_gpu 4 x "
        "gradient_accumulation_steps 2 x data-parallel size 3 (= 3 process(es) / "
        "(pipe_parallel_size 1 x model_parallel_size 1)): 4 x 2 x 3 = 24; "
        "write train_batch_size: 24, or leave one of the three out"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train_batch_size: 30", "leaves gradient_accumulation_steps = 30 / 12 = 2.5, not whole; "
         "write train_micro_batch_size_per_gpu: 2, or train_batch_size: 24 or 36"),
        ("train_batch_size: 5", "write train_batch_size: 12"),
        ("train_batch_size: 31\ntrain_micro_batch_size_per_gpu: null",
         "leaves train_micro_batch_size_per_gpu = 31 / 3"),
    ],
)  # fmt: skip
def test_what_does_not_divide(problems: Callable, text: str, says: str) -> None:
    (line,) = problems(text, world_size=3)
    assert says in line


@given(
    micro=st.integers(1, 9),
    steps=st.integers(1, 9),
    world=st.integers(1, 9),
    drop=st.sampled_from((None, *SIZES)),
)
def test_any_two_give_the_third(micro: int, steps: int, world: int, drop: str | None) -> None:
    whole = dict(zip(SIZES, (micro * steps * world, micro, steps), strict=True))
    values = {**whole, "pipe_parallel_size": 1, "model_parallel_size": 1}
    values["context_parallel_size"] = 1
    if drop:
        values[drop] = None
    assert list(derive(values, world)) == []
    assert {name: values[name] for name in SIZES} == whole


@given(st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(1, 9)), st.integers(1, 5))
def test_three_are_checked_exactly(sizes: tuple[int, int, int], world: int) -> None:
    total, micro, steps = sizes
    values = dict(zip(SIZES, sizes, strict=True)) | {
        "pipe_parallel_size": 1,
        "model_parallel_size": 1,
        "context_parallel_size": 1,
    }
    assert bool(list(derive(values, world))) == (total != micro * steps * world)
