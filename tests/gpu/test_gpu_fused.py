"""Test the fused Triton kernels on a GPU against float64 autograd of the eager formula.

Shapes cross several of the tiles in use (up to 128 rows and keys). Tolerances: `cases`.
"""

from __future__ import annotations

import random

import pytest
import torch

from megatron.attention import attend
from megatron.kernels.launch import LAUNCHES
from tests.helpers.embeddings import PLAIN
from tests.kernels.cases import LENGTH, TOLERANCE, assert_close, check, make
from tests.kernels.edges import EdgeCases

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FAR = 1 << 22


class TestEdges(EdgeCases):
    """Run the same cases as in Triton's interpreter."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PLAIN)
def test_every_embedding(name, dtype):
    """Compare the output and the gradients dq, dk, dv and dtheta."""
    check(make(name, 2, 3, LENGTH, 64, dtype=dtype))


@pytest.mark.parametrize("name", ["kerple_power_add_mul", "rpe"])
def test_heavy_kernels_in_wide_heads(name):
    check(make(name, 1, 2, LENGTH, 128, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 32, 64, 80, 96, 128, 256])
def test_head_sizes(size, dtype):
    """The scale keeps softmax weights away from 1. With weights near 1, theta's gradient would
    consist mostly of the rounding errors of the output."""
    check(make("kerple_log", 1, 2, LENGTH, size, dtype=dtype), scale=size**-0.5)


def test_head_sizes_that_are_no_multiple_of_anything():
    for size in (1, 3, 20, 33, 72, 100):
        check(make("kerple_log", 1, 2, 70, size))


SHAPES = [  # key heads, heads, queries, offset, later keys
    (1, 1, 1, 0, 0),
    (1, 1, 1, 500, 0),
    (1, 4, 1, 1023, 1),
    (2, 2, 128, 0, 0),
    (2, 6, 129, 0, 0),
    (1, 3, 127, 1, 0),
    (2, 4, 257, 300, 31),
    (1, 8, 64, 64, 64),
    (1, 1, 5, 1, 1000),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["kerple_log", "rpe"])
def test_offsets_tails_and_grouped_heads(name, shape, dtype):
    key_heads, heads, queries, offset, later = shape
    keys = offset + queries + later
    case = make(name, 2, heads, queries, 64, key_heads=key_heads, keys=keys, dtype=dtype)
    check(case, query_offset=offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group,queries", [(1, 1), (4, 1), (8, 5)])
def test_few_queries_in_parts_of_the_keys(group, queries, dtype):
    case = make("kerple_log", 2, 2 * group, queries, 128, key_heads=2, keys=3000, dtype=dtype)
    inputs = [x.detach() for x in case.inputs]
    options = {"query_offset": 3000 - queries}
    before = LAUNCHES.copy()
    with torch.no_grad():
        got = attend(*inputs[:3], case.pos, inputs[3], backend="fused", **options)
        assert LAUNCHES - before == {"decode": 1, "merge": 1}
        q, k, v, theta = (x.double() for x in inputs)
        exact = attend(q, k, v, case.pos, theta, backend="eager", **options)
    assert_close([got], [exact], TOLERANCE[dtype])


@pytest.mark.parametrize("seed", range(24))
def test_random_shapes(seed):
    draw = random.Random(seed)
    key_heads, group = draw.randint(1, 3), draw.randint(1, 3)
    queries, offset, later = draw.randint(1, 400), draw.randint(0, 300), draw.randint(0, 70)
    keys, dtype = offset + queries + later, draw.choice(DTYPES)
    name = draw.choice(["kerple_log", "kerple_power", "rpe", "none"])
    shape = {"batch": draw.randint(1, 3), "heads": key_heads * group, "queries": queries}
    case = make(name, **shape, size=64, key_heads=key_heads, keys=keys, dtype=dtype, seed=seed)
    check(case, query_offset=offset)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power", "kerple_power_mul", "rpe"])
def test_distances_past_two_to_the_22(name):
    """Three queries look four million keys back, so sums have four million terms.

    For rpe, the near buckets get as much weight as the last one. Otherwise their gradients would be
    small differences of large sums, and would be lost to rounding in fp32.
    """
    case = make(name, 1, 1, 3, 16, keys=FAR + 20)
    theta = case.inputs[3].detach().clamp(max=0.3)
    if name == "rpe":
        theta[:, :-1] += 10.0
    case.inputs[3] = theta.requires_grad_()
    got = case.run("fused", query_offset=FAR + 17)
    exact = case.run("eager", torch.float64, query_offset=FAR + 17)
    for n, (x, y) in enumerate(zip(got, exact, strict=True)):
        error, size = (x.double() - y).abs().max().item(), y.abs().max().item()
        assert error < 5e-4 * size, f"result {n}: {error} of {size}"
