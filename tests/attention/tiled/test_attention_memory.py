"""Test that the memory of blocked attention is linear, and how much it keeps for backward."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron.attention import attend
from megatron.attention.tiled import blocked_call
from megatron.positional import load
from tests.helpers.peak import peak_bytes

MB = 1 << 20


def inputs(name, heads, queries, keys, size=8):
    pos = load(name)
    q, k, v = (torch.randn(1, heads, n, size, requires_grad=True) for n in (queries, keys, keys))
    theta = pos.initial_theta(heads, torch.Generator().manual_seed(0)).requires_grad_()
    return pos, q, k, v, theta


def test_the_meter_sees_a_quadratic_buffer(tmp_path):
    pos, *case = inputs("kerple_log", 2, 1024, 1024)
    peak = peak_bytes(lambda: attend(*case[:3], pos, case[3], scale=1.0, backend="eager"), tmp_path)
    assert peak > 2 * 1024 * 1024 * 4


def test_forward_and_backward_at_16384(tmp_path):
    """For comparison, one fp32 matrix of all scores would take 1 GB."""
    pos, *case = inputs("kerple_log", 1, 16_384, 16_384)

    def call():
        out = attend(*case[:3], pos, case[3], scale=1.0, backend="blocked")
        torch.autograd.grad(out.sum(), case)

    assert peak_bytes(call, tmp_path) < 32 * MB


def test_evaluation_rows_at_65536(tmp_path):
    """The last 256 queries of 4 heads are accurate, and need only the memory of a few rows."""
    pos, *case = inputs("kerple_log", 4, 256, 65_536)
    results = []

    def call():
        with torch.no_grad():
            options = {"scale": 0.4, "query_offset": 65_536 - 256, "backend": "blocked"}
            results.append(attend(*case[:3], pos, case[3], **options))

    assert peak_bytes(call, tmp_path) < 96 * MB
    rows = [0, 200, 255]
    for row in rows:
        q = case[0][:, :, row : row + 1]
        options = {"scale": 0.4, "query_offset": 65_536 - 256 + row, "backend": "eager"}
        exact = attend(*(x.double() for x in (q, *case[1:3])), pos, case[3].double(), **options)
        got = results[0][:, :, row : row + 1].double()
        torch.testing.assert_close(got, exact, rtol=0, atol=2e-6)


def kept_elements(pos, q, k, v, theta) -> int:
    """Return how many numbers autograd's graph keeps, apart from the inputs."""
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(q, k, v, pos, theta, scale=1.0, backend="blocked")
    own = {x.untyped_storage().data_ptr() for x in (q, k, v, theta)}
    return sum(x.numel() for x in kept if x.untyped_storage().data_ptr() not in own)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_add_mul"])
@pytest.mark.parametrize("length", [30, 60, 120, 300])
def test_what_is_kept_for_backward(name, length):
    """The inputs are kept and, for short sequences, the softmax's result, which is then small."""
    pos, *case = inputs(name, 2, length, length)
    with mock.patch.object(blocked_call, "KEPT_SHARE", 0.0):
        least = kept_elements(pos, *case)
    assert least <= 20 * 2 * length  # a few vectors over distances, for the kernel's derivative
    more = kept_elements(pos, *case) - least
    if name == "kerple_log" and length < 100:
        assert 2 * length * length / 2 < more <= 1.5 * 4 * case[0].numel()
    else:
        assert more == 0


def test_nothing_is_kept_without_gradients():
    pos, *case = inputs("kerple_log", 2, 50, 50)
    with torch.no_grad():
        out = attend(*case[:3], pos, case[3], scale=1.0, backend="blocked")
    assert out.grad_fn is None and not out.requires_grad
