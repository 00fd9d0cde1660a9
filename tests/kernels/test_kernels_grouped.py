"""Test fused attention whose query heads share key heads, in Triton's interpreter."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron.attention.fused import functions_of
from megatron.kernels import launch
from megatron.kernels.documents_sink_decay import Terms
from megatron.kernels.launch import Setting, parts_of
from megatron.kernels.tile_sizes import Needs, look_up
from megatron.positional import load
from tests.helpers.terms import Case
from tests.kernels.cases import DEVICE, make


@pytest.mark.parametrize("fill", (1, 7, 1000))
@pytest.mark.parametrize("key_heads", (1, 2))
def test_a_group_in_one_program_in_two_or_in_four(fill, key_heads, monkeypatch):
    """Key tiles of 16 keys make 2 programs for each key head."""
    monkeypatch.setattr(launch, "FILL", fill)
    case = make("kerple_log", 1, 4 * key_heads, 21, 16, key_heads=key_heads, keys=32)
    got = case.run("fused", query_offset=11)
    exact = case.run("eager", torch.float64, query_offset=11)
    for x, y in zip(got, exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=5e-6 * y.abs().max().item())


@pytest.mark.parametrize("terms", (["bias", "documents"], ["bias", "sink", "decay"]))
def test_terms_with_a_group_in_one_program(terms, monkeypatch):
    """With a decay, each query head still has programs of its own: they sum its gradient."""
    monkeypatch.setattr(launch, "FILL", 1)
    case = Case(terms, 1, 4, 21, 11, size=8, group=4)
    inputs = case.rounded(torch.float32)
    exact = case.run("eager", [x.detach().double().requires_grad_() for x in inputs])
    for x, y in zip(case.run("fused", inputs), exact, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-5 * y.abs().max().item())


def test_the_number_of_parts_divides_the_group_and_fills_a_gpu():
    assert launch.FILL == 1024
    assert [parts_of(32, n) for n in (1, 64, 400, 512, 800, 1024)] == [32, 16, 4, 2, 2, 1]
    assert parts_of(6, 400) == 3 and parts_of(1, 1) == 1 and parts_of(7, 400) == 7


@pytest.mark.parametrize("size", (64, 128))
@pytest.mark.parametrize("batch,length", ((8, 2048), (4, 4096), (1, 16_384), (1, 4096)))
def test_the_key_pass_of_one_key_head_fills_a_gpu(size, batch, length):
    """32 query heads share one key head. Without parts, 32 to 256 programs would start."""
    started = []

    def count(which, programs, tile, setting, tensors, parts=1, **_):
        started.append(programs * parts) if which == "key" else None

    q = torch.empty(batch, 32, length, size, device="meta", dtype=torch.bfloat16)
    k = torch.empty(batch, 1, length, size, device="meta", dtype=torch.bfloat16)
    tiles, functions = look_up(90, 2, size, Needs()), functions_of(load("none"))[0]
    with mock.patch.object(launch, "launch", count):
        dk, _, _ = launch.key_gradients(
            Setting(functions, 1.0, tile_sizes=tiles), tiles.key, {"q": q, "k": k}, Terms()
        )
    assert started[0] >= launch.FILL and dk.shape == k.shape


def test_the_gradient_repeats_bit_for_bit(monkeypatch):
    monkeypatch.setattr(launch, "FILL", 1000)
    case = make("kerple_log", 1, 4, 21, 16, key_heads=1, keys=32)
    first, second = (case.run("fused", query_offset=11) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), DEVICE
