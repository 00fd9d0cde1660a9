"""Test products with weight matrices: each way against float64, and the choice."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from benchmarks.host import linear_time as benchmark
from megatron.parallel import matmul_library as module
from megatron.parallel.matmul_library import linear, prefers_onednn

AMD, INTEL = "vendor_id\t: AuthenticAMD\n", "vendor_id\t: GenuineIntel\n"


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def library(request, monkeypatch):
    monkeypatch.setattr(module, "PREFERS_ONEDNN", request.param)


def operands(shape: tuple[int, ...], out: int, bias: bool, dtype=torch.float32):
    """Return x, a weight, a bias or None, and a gradient of the result."""
    torch.manual_seed(0)
    leaves = [torch.randn(*shape), torch.randn(out, shape[-1])] + [torch.randn(out)] * bias
    grad = torch.randn(*shape[:-1], out)
    return [leaf.to(dtype).requires_grad_() for leaf in leaves], grad.to(dtype)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape", [(16, 128, 24), (1, 64, 24), (4096, 24), (2, 33, 24), (1, 1, 24), (0, 24), (24,)]
)
def test_values_and_gradients_are_those_in_float64(shape, bias):
    leaves, grad = operands(shape, 40, bias)
    exact, wide = operands(shape, 40, bias, torch.float64)
    found, expected = linear(*leaves), F.linear(*exact)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    for mine, other in zip(
        torch.autograd.grad(found, leaves, grad),
        torch.autograd.grad(expected, exact, wide),
        strict=True,
    ):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-3)
        assert mine.is_contiguous()  # so the engine copies nothing when it flattens gradients


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("out", [40, 41], ids=["whole slices", "no whole slices"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 24), (4, 24), (2, 2, 24), (5, 24), (31, 24), (32, 24), (24,), (0, 24)]
)
def test_few_rows_without_gradients_are_those_in_float64(monkeypatch, shape, out, bias):
    """A token of generation is a row. With gradients, few rows have torch's own product."""
    monkeypatch.setattr(module, "PREFERS_ONEDNN", True)
    leaves, _ = operands(shape, out, bias)
    exact, _ = operands(shape, out, bias, torch.float64)
    sliced = mock.Mock(wraps=module.by_slices)
    monkeypatch.setattr(module, "by_slices", sliced)
    with torch.inference_mode():
        found = linear(*leaves)
        assert sliced.called == (out == 40 and 0 < leaves[0][..., 0].numel() <= 4)
        spread = linear(leaves[0].mT.contiguous().mT if len(shape) > 1 else leaves[0], *leaves[1:])
    assert found.shape == (*shape[:-1], out)
    torch.testing.assert_close(found.double(), F.linear(*exact), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(spread, found, rtol=1e-5, atol=1e-4)
    assert found.is_contiguous()
    assert torch.equal(linear(*leaves), F.linear(*leaves))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_multiplied_as_torch_does(monkeypatch, dtype):
    monkeypatch.setattr(module, "PREFERS_ONEDNN", True)
    leaves, _ = operands((16, 64, 24), 40, True, dtype)
    assert torch.equal(linear(*leaves), F.linear(*leaves))


def test_a_transposed_input_is_right(monkeypatch):
    monkeypatch.setattr(module, "PREFERS_ONEDNN", True)
    (x, weight, bias), _ = operands((64, 16, 24), 40, True)
    found = linear(x.transpose(0, 1), weight, bias)
    torch.testing.assert_close(found, F.linear(x.transpose(0, 1), weight, bias))


def test_the_gradients_repeat_bit_for_bit(monkeypatch):
    monkeypatch.setattr(module, "PREFERS_ONEDNN", True)
    leaves, grad = operands((16, 128, 64), 96, True)
    first, again = (torch.autograd.grad(linear(*leaves), leaves, grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.usefixtures("library")
def test_a_compiled_step_is_one_graph():
    leaves, _ = operands((16, 64, 24), 40, True)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*leaves), linear(*leaves))


def test_onednn_is_chosen_on_amd_with_avx512(monkeypatch, tmp_path: Path):
    processors = tmp_path / "cpuinfo"
    assert not prefers_onednn(processors)  # no such file: not Linux
    for capability, text, expected in (
        ("AVX512", AMD, True),
        ("AVX2", AMD, False),
        ("AVX512", INTEL, False),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        processors.write_text(text)
        assert prefers_onednn(processors) is expected


def test_the_benchmark_compares_both_libraries(monkeypatch):
    monkeypatch.setattr(module, "PREFERS_ONEDNN", False)
    args = benchmark.parser().parse_args(["--widths", "16", "--rows", "64", "--rounds", "2"])
    rows = benchmark.measure(args)
    assert [row["passes"] for row in rows] == list(benchmark.PASSES)
    assert all(row["MKL, ms"] > 0 and row["oneDNN, ms"] > 0 for row in rows)
