"""Test the fused Triton kernels against float64 autograd of the eager formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.attention.fused import functions_of
from megatron.kernels import compiled_variants
from megatron.kernels.launch import Setting, backward, forward
from megatron.kernels.tile_sizes import Tile, TileSizes
from megatron.positional import load
from tests.helpers.embeddings import ALIKE, QUICK
from tests.kernels.cases import DEVICE, TOLERANCE, check, make

DISTANCE = [name for name in QUICK if load(name).kind == "distance"]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", QUICK)
def test_every_embedding(name, dtype):
    """There is one sequence of 37 rows: two complete tiles of 16 rows and an incomplete one."""
    check(make(name, 1, dtype=dtype))


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
    """Cases are incomplete tiles, cached and unused keys, shared key heads, padded head sizes."""
    shape = {"batch": 1, "heads": key_heads * group, "queries": queries, "size": size}
    keys = offset + queries + later
    case = make(name, **shape, key_heads=key_heads, keys=keys, seed=queries)
    check(case, query_offset=offset)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_mul"])
def test_scaled_distances(name):
    case = make(load(name).scaled(0.37), 1)
    assert functions_of(case.pos)[1] == "evaluated in registers"
    check(case)


@pytest.mark.parametrize("name", [name for name in DISTANCE if name not in ALIKE])
def test_one_token(name):
    check(make(name, queries=1))
    check(make(name, queries=1, keys=30), query_offset=29)


@pytest.mark.parametrize("size", [80, 96, 128])
def test_head_sizes_of_published_models(size):
    check(make("kerple_log", 1, 1, 20, size))


FAR = 1 << 22


@pytest.mark.parametrize("name", ["kerple_log", "rpe"])
def test_distances_past_two_to_the_22(name, monkeypatch):
    """Three queries look four million keys back, in tiles wide enough for an interpreter.

    Heads of one number, without the padding, which would cost 16 times the memory accesses.
    """
    monkeypatch.setattr(compiled_variants, "padded", lambda size: size)
    case = make(name, 1, 1, 3, 1, keys=FAR + 20)
    case.inputs[3] = case.inputs[3].detach().clamp(max=0.3).requires_grad_()
    pos, offset, theta = case.pos, FAR + 17, case.inputs[3]
    q, k, v = (x.detach() for x in case.inputs[:3])
    wide = TileSizes(*[Tile(4, 65_536, 4, 1)] * 3, Tile(16, 16, 4, 1))
    functions, _ = functions_of(pos)
    rows = theta.detach()
    if functions.tabulated:
        rows = pos.bias(rows, torch.arange(offset + 3, device=DEVICE)) / 0.35
    setting = Setting(functions, 0.35, offset, tile_sizes=wide)
    out, *kept = forward(q, k, v, rows, None, setting)
    want_theta = not functions.tabulated  # its pass takes square tiles: far too many here
    got = backward(case.grad, q, k, v, out, *kept, rows, None, setting, want_theta)[:4]
    exact = case.run("eager", torch.float64, query_offset=offset)
    for x, y in zip((out, *got), exact, strict=True):
        if x is not None:
            error, size = (x.double() - y).abs().max().item(), y.abs().max().item()
            assert error < 2e-4 * size, f"{error} of {size}"
