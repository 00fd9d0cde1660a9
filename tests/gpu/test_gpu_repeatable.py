"""Test on a GPU: bitwise repetition, dropout masks, launches, other streams and devices."""

from __future__ import annotations

import pytest
import torch

from megatron.attention import cache_launches
from megatron.attention.fused import functions_of
from megatron.kernels.launch import Setting, backward, forward
from tests.kernels import cases
from tests.kernels.cases import make
from tests.kernels.repeatable import RepeatableCases

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


class TestRepeatable(RepeatableCases):
    """Run the same cases as in Triton's interpreter."""


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_add_mul", "rpe"])
def test_many_programs_repeat_bit_for_bit(name, dropout_p):
    """There are more programs than fit on the GPU at once, so that their order varies."""
    case = make(name, 8, 12, 1000, 64, dtype=BF16)
    runs = []
    for _ in range(4):
        torch.manual_seed(3)
        runs.append(case.run("fused", dropout_p=dropout_p))
    assert all(same(runs[0], run) for run in runs[1:])


def test_another_stream_gives_the_same_bits():
    """Other work runs on the default stream at the same time."""
    case = make("kerple_log", 4, 12, 700, 64, dtype=BF16)
    torch.manual_seed(3)
    expected = case.run("fused", dropout_p=0.1)
    noise = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(10):
        noise @ noise
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.manual_seed(3)
        got = case.run("fused", dropout_p=0.1)
    stream.synchronize()
    assert same(got, expected)


def test_a_cuda_graph_of_cached_launches_gives_the_same_bits():
    """The graph is replayed with other inputs than those with which it was captured."""
    case = make("kerple_log", 2, 12, 300, 64, dtype=BF16)
    inputs = [x.detach() for x in case.inputs]
    setting = Setting(functions_of(case.pos)[0], 0.35)

    def run() -> list[torch.Tensor]:
        q, k, v, theta = inputs
        out, *kept = forward(q, k, v, theta, None, setting)
        found = backward(case.grad, q, k, v, out, *kept, theta, None, setting, True)
        return [out, *found[:4]]

    cache_launches(True)
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
    finally:
        cache_launches(False)
    for x in inputs[:3]:
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert same(captured, run())


def test_dropout_keeps_the_mean():
    """With v = 1, the output shows the sums of softmax weights, which are 1 on average."""
    case = make("kerple_log", 8, 8, 512, 16)
    case.inputs[2] = torch.ones_like(case.inputs[2]).requires_grad_()
    out = case.run("fused", dropout_p=0.25)[0]
    assert abs(out[:, :, 64:].mean().item() - 1.0) < 1e-2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs in one machine")
def test_a_device_that_is_not_the_current_one(monkeypatch):
    monkeypatch.setattr(cases, "DEVICE", "cuda:1")
    case = make("kerple_log", 2, 3, 333, 64, dtype=BF16)
    assert torch.cuda.current_device() == 0
    got = case.run("fused")
    assert {x.device for x in got} == {torch.device("cuda:1")}
    cases.check(case)
