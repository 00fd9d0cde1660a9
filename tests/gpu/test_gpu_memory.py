"""Test long sequences and large tensors on a GPU: linear memory, 64-bit offsets.

The largest test takes about 40 GB.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatron.attention import attend
from megatron.positional import load, within_bounds
from tests.kernels.cases import TOLERANCE, Case, assert_close

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
DEVICE = "cuda"
LONG = 65_536
MEGABYTE = 1 << 20
LIMIT = 1 << 31
PITCH = 1 << 21


def big(name: str, batch: int, heads: int, length: int, size: int = 64) -> Case:
    """Make a case as `cases.make` does, but draw it on the GPU in bf16."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    pos = load(name)
    shape = batch, heads, length, size
    options = {"generator": generator, "device": DEVICE, "dtype": BF16}
    q, k, v, grad = (torch.randn(shape, **options) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    if pos.kind == "distance":
        theta = pos.initial_theta(heads, torch.Generator().manual_seed(0)) + 0.02
        theta = within_bounds(theta, pos.parameters)
        inputs.append(theta.to(DEVICE).requires_grad_())
    return Case(pos, inputs, grad)


def peak(call) -> int:
    """Return the peak memory in bytes that a call allocates, including its results."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    del results
    return torch.cuda.max_memory_allocated() - before


def gradients(case: Case, backend: str = "fused"):
    out = attend(*case.inputs[:3], case.pos, *case.inputs[3:], scale=0.125, backend=backend)
    return out.detach(), *torch.autograd.grad(out, case.inputs, case.grad)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_add_mul", "rpe", "none"])
def test_memory_is_linear_in_the_length(name):
    peaks = []
    for length in (LONG // 2, LONG):
        case = big(name, 1, 4, length)
        gradients(case)  # compiles and loads what it needs
        peaks.append(peak(lambda case=case: gradients(case)))
    assert peaks[1] < 2.1 * peaks[0]
    results = 5 * case.grad.nbytes  # out, what its rounding lost, dq, dk, dv
    per_row = 2 * 4 * 4 * LONG  # two fp32 numbers for each of 4 heads
    assert peaks[1] < results + per_row + 16 * MEGABYTE  # tables and sums of theta


def test_the_kernel_costs_less_than_a_megabyte():
    """The comparison is with attention without a distance kernel, torch's flash attention."""
    case = big("kerple_log", 1, 12, LONG // 4)
    plain = Case(load("none"), case.inputs[:3], case.grad)
    q, k, v = plain.inputs

    def flash():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.detach(), *torch.autograd.grad(out, plain.inputs, plain.grad)

    calls = (lambda: gradients(case), lambda: gradients(plain), flash)
    for call in calls:
        call()
    with_kernel, without, by_flash = (peak(call) for call in calls)
    assert with_kernel <= without + MEGABYTE
    lost = case.grad.nbytes  # what the output lost when it was rounded
    assert with_kernel <= by_flash + lost + MEGABYTE


def test_evaluation_keeps_nothing():
    case = big("kerple_log", 1, 4, LONG)

    def evaluate():
        with torch.no_grad():
            inputs = (*case.inputs[:3], case.pos, *case.inputs[3:])
            return attend(*inputs, scale=0.125, backend="fused")

    evaluate()
    assert peak(evaluate) < case.grad.nbytes + 4 * 4 * LONG + MEGABYTE


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power", "rpe", "none"])
def test_rows_of_a_long_sequence(name):
    """Compare some rows of out and dq, and the last rows of dk and dv, with float64."""
    case = big(name, 1, 2, LONG + 40)
    out, dq, dk, dv, *_ = gradients(case)
    length, few = case.grad.shape[2], 16
    exact = [x.detach().double() for x in case.inputs]
    for start in (0, 1000, LONG // 2 - 8, length - few):
        rows, seen = slice(start, start + few), slice(0, start + few)
        q = exact[0][:, :, rows].requires_grad_()
        k, v = (x[:, :, seen].clone().requires_grad_() for x in exact[1:3])
        inputs = (q, k, v, case.pos, *exact[3:])
        y = attend(*inputs, scale=0.125, query_offset=start, backend="eager")
        true = [y, *torch.autograd.grad(y, (q, k, v), case.grad[:, :, rows].double())]
        got = [out[:, :, rows], dq[:, :, rows]]
        if start + few == length:  # no other row sees these keys
            true[2:] = [x[:, :, rows] for x in true[2:]]
            got += [dk[:, :, rows], dv[:, :, rows]]
        assert_close(got, true[: len(got)], TOLERANCE[BF16])


def test_rows_gigabytes_apart():
    """Rows are 2^21 elements apart, so that the last one begins past element 2^31."""
    length, size = 1100, 64
    shape = (1, 2, length, size)
    buffer = torch.empty(length * PITCH, device=DEVICE, dtype=BF16)
    case = big("kerple_log", *shape[:3])
    views = []
    for n, x in enumerate((*case.inputs[:3], case.grad)):
        view = buffer.as_strided(shape, (0, size, PITCH, 1), 2 * n * size)
        views.append(view.copy_(x.detach()))
    assert views[0].stride(2) * (length - 1) > LIMIT
    expected = gradients(case)
    inputs = [x.detach().requires_grad_() for x in views[:3]]
    got = gradients(Case(case.pos, [*inputs, *case.inputs[3:]], views[3]))
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_more_than_two_to_the_31_elements():
    """The results of the last sequences equal, bit for bit, those of a call with them alone."""
    heads, length = 16, 128
    batch = LIMIT // (heads * length * 64) + 9
    case = big("kerple_log", batch, heads, length)
    assert case.grad.numel() > LIMIT
    results = gradients(case)
    last = slice(batch - 3, batch)
    inputs = [x.detach()[last].requires_grad_() for x in case.inputs[:3]]
    few = Case(case.pos, [*inputs, case.inputs[3]], case.grad[last])
    alone = gradients(few)
    for got, expected in zip(results[:4], alone[:4], strict=True):
        assert torch.equal(got[last], expected)
    exact = few.run("eager", torch.float64, scale=0.125)
    assert_close(list(alone), exact, TOLERANCE[BF16])
    parts = torch.zeros_like(results[4], dtype=torch.float64)
    for start in range(0, batch, 2048):
        piece = slice(start, start + 2048)
        inputs = [x.detach()[piece].requires_grad_() for x in case.inputs[:3]]
        parts += gradients(Case(case.pos, [*inputs, case.inputs[3]], case.grad[piece]))[4]
    assert_close([results[4]], [parts], 1e-4)
