"""The fused passes against float64 autograd of the eager formula: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch
from cases import DEVICE, TOLERANCE, check, make
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.attention.fused import functions_of
from megatron.kernels.blocks import Blocks, Tile
from megatron.kernels.launch import Setting, backward, forward
from megatron.positional import load, names

DISTANCE = [name for name in names() if load(name).kind == "distance"]
LEARNABLE = [name for name in DISTANCE if load(name).learnable]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", names())
def test_every_embedding(name, dtype):
    """37 rows: two whole tiles of 16 and a tail."""
    check(make(name, dtype=dtype))


@settings(max_examples=30)
@given(
    name=st.sampled_from([*DISTANCE, "none"]),
    key_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    queries=st.integers(1, 40),
    offset=st.integers(0, 40),
    later=st.integers(0, 20),
    size=st.integers(1, 20),
)
def test_any_shape(name, key_heads, group, queries, offset, later, size):
    """Tails, cached keys, keys that nobody may see, shared key heads, padded head sizes."""
    shape = {"batch": 1, "heads": key_heads * group, "queries": queries, "size": size}
    keys = offset + queries + later
    case = make(name, **shape, key_heads=key_heads, keys=keys, seed=queries)
    check(case, query_offset=offset)


@pytest.mark.parametrize("name", DISTANCE)
def test_one_token(name):
    check(make(name, queries=1))
    check(make(name, queries=1, keys=30), query_offset=29)


@pytest.mark.parametrize("size", [80, 96, 128])
def test_head_sizes_of_published_models(size):
    check(make("kerple_log", 1, 1, 20, size))


@pytest.mark.parametrize("edge", ["low", "high"])
@pytest.mark.parametrize("name", [name for name in LEARNABLE if name != "rpe"])
def test_theta_at_its_bounds(name, edge):
    """Where there is no upper bound, 3 stands for it."""
    case = make(name, 1, 2, 40)
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
        assert gradient.abs().max() < 1e-5


FAR = 1 << 22


@pytest.mark.parametrize("name", ["kerple_log", "rpe"])
def test_distances_past_two_to_the_22(name):
    """Three queries that look four million keys back, in tiles wide enough for an interpreter."""
    case = make(name, 1, 1, 3, 2, keys=FAR + 20)
    case.inputs[3] = case.inputs[3].detach().clamp(max=0.3).requires_grad_()
    pos, offset, theta = case.pos, FAR + 17, case.inputs[3]
    q, k, v = (x.detach() for x in case.inputs[:3])
    wide = Blocks(*[Tile(4, 65_536, 4, 1)] * 3, Tile(16, 16, 4, 1))
    functions, _ = functions_of(pos)
    rows = theta.detach()
    if functions.tabulated:
        rows = pos.bias(rows, torch.arange(offset + 3, device=DEVICE)) / 0.35
    setting = Setting(functions, 0.35, offset, blocks=wide)
    out, lse = forward(q, k, v, rows, None, setting)
    want_theta = not functions.tabulated  # its pass takes square tiles: far too many here
    got = backward(case.grad, q, k, v, out, lse, rows, None, setting, want_theta)
    exact = case.run("eager", torch.float64, query_offset=offset)
    for x, y in zip((out, *got), exact, strict=True):
        if x is not None:
            error, size = (x.double() - y).abs().max().item(), y.abs().max().item()
            assert error < 2e-4 * size, f"{error} of {size}"


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_add_mul", "rpe"])
def test_the_layout_a_model_gives(name):
    """q, k, v as slices of one projection, heads before positions, contiguous nowhere."""
    case = make(name, 2, 3, 40, 16)
    theta = case.inputs[3]
    x = torch.randn(2, 40, 3 * 3 * 16, device=DEVICE)
    grads = []
    for backend, dtype in (("fused", torch.float32), ("eager", torch.float64)):
        from megatron.attention import attend

        leaf, rows = x.to(dtype).requires_grad_(), theta.detach().to(dtype).requires_grad_()
        q, k, v = leaf.unflatten(-1, (3, 48)).transpose(1, 2).chunk(3, dim=-1)
        out = attend(q, k, v, case.pos, rows, scale=0.35, backend=backend).transpose(1, 2)
        if backend == "fused":
            assert out.is_contiguous()  # as the next projection wants it
        grads.append([out, *torch.autograd.grad(out.flatten(2).square().sum(), (leaf, rows))])
    for got, exact in zip(*grads, strict=True):
        assert (got - exact).abs().max() < 5e-6 * max(1.0, exact.abs().max().item())


def test_some_inputs_without_gradient():
    for wanted in range(4):
        case = make("kerple_power_add_mul", 1, 2, 20, 8)
        full = case.run("fused")
        for n, x in enumerate(case.inputs):
            x.requires_grad_(n == wanted)
        out, only = case.run("fused")
        assert torch.equal(out, full[0]) and torch.equal(only, full[1 + wanted])


def test_nothing_to_do():
    for shape in ({"batch": 0}, {"queries": 0, "keys": 5}):
        case = make("kerple_log", **shape)
        results = case.run("fused")
        assert [x.shape for x in results[1:]] == [x.shape for x in case.inputs]
        assert all((x == 0).all() for x in results[1:])


def test_large_scores_do_not_overflow():
    case = make("kerple_log", 1, 2, 40, 8)
    case.inputs[0] = (case.inputs[0].detach() * 300).requires_grad_()
    results = case.run("fused")
    assert all(x.isfinite().all() for x in results)
    check(case, tolerance=2e-4)  # scores near 1000, in fp32
