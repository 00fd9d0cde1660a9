"""Test all attention backends on a GPU against float64, also with a newly defined kernel."""

from __future__ import annotations

import pytest
import torch

from megatron.attention import AttentionError, attend, choose, flex
from megatron.attention.backend import Request
from megatron.attention.choice import BACKENDS
from megatron.attention.fused import functions_of
from megatron.attention.sdpa import refusal as sdpa_refusal
from megatron.positional import load, names
from tests.attention import new_kernel
from tests.helpers.embeddings import PLAIN
from tests.kernels.cases import TOLERANCE, assert_close, make

pytestmark = pytest.mark.gpu

pos = new_kernel.new_kernel
BF16 = torch.bfloat16
LENGTH = 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("backend", ["auto", *(name for name in BACKENDS if name != "flex")])
@pytest.mark.parametrize("name", PLAIN)
def test_every_pair_works_or_is_refused_with_what_works(name, backend, dtype):
    """`flex` is tested elsewhere, because it takes long to compile."""
    case = make(name, 1, 2, LENGTH, 64, dtype=dtype)
    try:
        chosen = choose(backend, case.pos, device_type="cuda", dtype=dtype, head_size=64)
    except AttentionError as error:
        assert backend == "sdpa" and case.pos.kind == "distance"
        assert "use auto, eager, blocked, fused" in str(error)
        return
    assert chosen.name == ("fused" if backend == "auto" else backend)
    got, exact = case.run(backend), case.run("eager", torch.float64)
    assert_close(got, exact, TOLERANCE[dtype])


@pytest.mark.parametrize("name", [name for name in names() if load(name).kind == "distance"])
def test_sdpa_evaluates_with_a_mask(name):
    case = make(name, 1, 2, LENGTH, 64, dtype=BF16)
    inputs = (*(x.detach() for x in case.inputs[:3]), case.pos, case.inputs[3].detach())
    if sdpa_refusal(Request(case.pos, "cuda", BF16, training=False)):
        with pytest.raises(AttentionError, match="multiplies scores"):
            attend(*inputs, scale=0.35, backend="sdpa")
        return
    got = attend(*inputs, scale=0.35, backend="sdpa")
    exact = attend(*(x.double() for x in inputs[:3]), *inputs[3:], scale=0.35, backend="eager")
    assert_close([got], [exact], TOLERANCE[BF16])


FLEX = [
    ("kerple_log", torch.float32),
    ("kerple_log", BF16),
    ("kerple_power_add_mul", BF16),
    ("rpe", BF16),
    ("alibi", BF16),
    ("none", BF16),
]


@pytest.mark.parametrize(("name", "dtype"), FLEX)
def test_flex_with_gradients(name, dtype):
    """The score_mod captures theta's columns [H], or a table for rpe."""
    case = make(name, 2, 2, LENGTH, 64, dtype=dtype)
    assert_close(case.run("flex"), case.run("eager", torch.float64), 2 * TOLERANCE[dtype])


def test_flex_with_a_captured_table(monkeypatch):
    monkeypatch.setattr(flex, "formula_of", lambda embedding: None)
    case = make("kerple_log", 2, 2, LENGTH, 64, dtype=BF16)
    assert_close(case.run("flex"), case.run("eager", torch.float64), 2 * TOLERANCE[BF16])


def test_flex_with_grouped_heads_and_an_offset():
    case = make("kerple_log", 1, 4, 200, 64, key_heads=2, keys=333, dtype=BF16)
    exact = case.run("eager", torch.float64, query_offset=133)
    assert_close(case.run("flex", query_offset=133), exact, 2 * TOLERANCE[BF16])


def test_a_new_kernel_in_one_file(pos):
    """Test `eager` with numpy in float64, then `fused` and `flex` with `eager` (and gradients)."""
    assert not functions_of(pos)[0].tabulated
    case = make(pos, 2, 3, 140, 32)
    q, k, v, theta = (x.detach().double().cpu().numpy() for x in case.inputs)
    truth = torch.from_numpy(new_kernel.exact(q, k, v, theta, 0.35))
    exact = case.run("eager", torch.float64)
    torch.testing.assert_close(exact[0].cpu(), truth, atol=1e-9, rtol=0)
    for backend in ("fused", "flex"):
        assert_close(case.run(backend), exact, 2 * TOLERANCE[torch.float32])
    half = make(pos, 2, 3, 140, 32, dtype=BF16)
    for backend in ("fused", "flex"):
        assert_close(half.run(backend), half.run("eager", torch.float64), 2 * TOLERANCE[BF16])
