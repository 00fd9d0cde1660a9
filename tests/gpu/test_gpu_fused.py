"""The fused passes on a GPU against float64 autograd of the eager formula.

Shapes cross several of the tiles in use (up to 128 rows and keys). Tolerances: ``cases``.
"""

from __future__ import annotations

import random

import pytest
import torch
from cases import DEVICE, TOLERANCE, assert_close, check, make

from megatron.attention import attend
from megatron.positional import load, names

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DISTANCE = [name for name in names() if load(name).kind == "distance"]
LEARNABLE = [name for name in DISTANCE if load(name).learnable]
LENGTH = 333
FAR = 1 << 22


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", names())
def test_every_embedding(name, dtype):
    """Output, dq, dk, dv, dtheta."""
    check(make(name, 2, 3, LENGTH, 64, dtype=dtype))


@pytest.mark.parametrize("name", ["kerple_power_add_mul", "rpe"])
def test_heavy_kernels_in_wide_heads(name):
    check(make(name, 1, 2, LENGTH, 128, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 32, 64, 80, 96, 128, 256])
def test_head_sizes(size, dtype):
    check(make("kerple_log", 1, 2, LENGTH, size, dtype=dtype))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("edge", ["low", "high"])
@pytest.mark.parametrize("name", [name for name in LEARNABLE if name != "rpe"])
def test_theta_at_its_bounds(name, edge, dtype):
    """Where there is no upper bound, 3 stands for it."""
    case = make(name, 1, 2, LENGTH, 64, dtype=dtype)
    bound = case.pos.bounds()[edge == "high"].clamp(max=3.0)
    case.inputs[3] = bound.expand(2, -1).clone().to(DEVICE).requires_grad_()
    check(case)


@pytest.mark.parametrize("name", DISTANCE)
def test_the_diagonal_alone(name):
    """One key in sight, so d = 0: the weight is 1, and theta has no gradient, not even NaN."""
    case = make(name, queries=1)
    out, *gradients = case.run("fused")
    torch.testing.assert_close(out, case.inputs[2])
    for gradient in (gradients[0], *gradients[3:]):
        assert gradient.abs().max() < 2e-5


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power", "kerple_power_mul", "rpe"])
def test_distances_past_two_to_the_22(name):
    """Three queries that look four million keys back; the sums have as many terms."""
    case = make(name, 1, 1, 3, 16, keys=FAR + 20)
    case.inputs[3] = case.inputs[3].detach().clamp(max=0.3).requires_grad_()
    got = case.run("fused", query_offset=FAR + 17)
    exact = case.run("eager", torch.float64, query_offset=FAR + 17)
    for n, (x, y) in enumerate(zip(got, exact, strict=True)):
        error, size = (x.double() - y).abs().max().item(), y.abs().max().item()
        assert error < 5e-4 * size, f"result {n}: {error} of {size}"


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_add_mul", "rpe", "none"])
def test_the_layout_a_model_gives(name):
    """q, k, v as slices of one projection in bf16, heads before positions, contiguous nowhere."""
    case = make(name, 2, 3, LENGTH, 64)
    x = torch.randn(2, LENGTH, 3 * 3 * 64, device=DEVICE).to(DTYPES[0])
    grads = []
    for backend, dtype in (("fused", DTYPES[0]), ("eager", torch.float64)):
        leaf = x.to(dtype, copy=True).requires_grad_()
        theta = [rows.detach().to(torch.float64).requires_grad_() for rows in case.inputs[3:]]
        q, k, v = leaf.unflatten(-1, (3, 192)).transpose(1, 2).chunk(3, dim=-1)
        out = attend(q, k, v, case.pos, *theta, scale=0.35, backend=backend).transpose(1, 2)
        assert backend == "eager" or out.is_contiguous()  # as the next projection wants it
        grad = case.grad.transpose(1, 2).to(dtype)
        grads.append([out, *torch.autograd.grad(out, (leaf, *theta), grad)])
    assert_close(*grads, TOLERANCE[DTYPES[0]])


def test_large_scores_do_not_overflow():
    for dtype, tolerance in ((torch.float32, 1e-3), (DTYPES[0], 2 * TOLERANCE[DTYPES[0]])):
        case = make("kerple_log", 1, 2, LENGTH, 64, dtype=dtype)
        case.inputs[0] = (case.inputs[0].detach() * 100).requires_grad_()
        assert all(x.isfinite().all() for x in case.run("fused"))
        check(case, tolerance)


def test_nothing_to_do():
    for shape in ({"batch": 0}, {"queries": 0, "keys": 5}):
        results = make("kerple_log", **shape).run("fused")
        assert all((x == 0).all() for x in results[1:])
