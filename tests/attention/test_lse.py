"""Test `lse`, the logarithm of the softmax's denominators, and its gradients in each backend."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.attention import AttentionError, attend
from megatron.positional import load
from tests.helpers.terms import Case, assert_same

CASES = [
    ("bias",),
    ("bias", "decay", "documents", "window"),
    ("weight", "sink"),
    ("table", "decay", "sink"),
    ("temperature", "bias", "sink", "decay", "documents"),
]
EXACT = torch.float64


def results(case, backend, dtype, *, gradients):
    """Return out, lse and, if asked for, the gradients of a loss that contains both."""
    inputs = [x.detach().to(dtype if n < 4 else x.dtype) for n, x in enumerate(case.inputs)]
    inputs = [x.requires_grad_(gradients) for x in inputs]
    out, lse = case.out(backend, inputs, return_lse=True)
    if not gradients:
        return [out, lse]
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(lse.shape, generator=generator, dtype=EXACT).to(dtype)
    loss = (out * case.grad.to(dtype)).sum() + (lse * weights).sum()
    return [out, lse, *torch.autograd.grad(loss, inputs)]


def test_eager_against_the_formula():
    case = Case(("bias", "sink"), 2, 2, 9, 3, size=8)
    (q, k, v, theta), scale = case.inputs, case.options["scale"]
    (p, a, sink), (d, i) = theta.T[:, :, None, None], (torch.arange(12), torch.arange(9) + 3)
    d = i[:, None] - d
    logits = scale * (q @ k.mT) - p * torch.log1p(a * d.clamp(min=0))
    logits = logits.masked_fill(d < 0, -math.inf)
    denominators = logits.exp().sum(-1) + sink[..., 0].exp()
    out, lse = case.out("eager", case.inputs, return_lse=True)
    assert_same([lse], [denominators.log()], 1e-12)
    assert_same([out], [logits.exp() / denominators[..., None] @ v], 1e-12)


@pytest.mark.parametrize("terms", CASES, ids=" ".join)
def test_against_eager_in_float64(terms):
    """The rows of fused are in two blocks with different references for the decay."""
    case = Case(terms, 1, 2, 150, 7, size=8)
    exact = results(case, "eager", EXACT, gradients=True)
    assert exact[1].shape == (1, 2, 150)
    assert_same(results(case, "blocked", EXACT, gradients=True), exact, 1e-12)
    assert_same(results(case, "flex", EXACT, gradients=False), exact[:2], 1e-12)
    got = results(case, "blocked", torch.float32, gradients=False)
    assert got[1].dtype == torch.float32
    assert_same(got, exact[:2], 1e-5)


@pytest.mark.parametrize("terms", CASES[1:4], ids=" ".join)
def test_fused_against_eager_in_float64(terms):
    case = Case(terms, 1, 1, 135, 3, size=8)
    exact = results(case, "eager", EXACT, gradients=False)
    with torch.no_grad():
        assert_same(results(case, "fused", torch.float32, gradients=False), exact, 1e-5)


def test_fused_has_no_gradient_of_lse():
    """It has those of the output, and an error for a loss that contains lse."""
    case = Case(("bias",), 1, 1, 5, size=8)
    inputs = case.rounded(torch.float32)
    out, lse = case.out("fused", inputs, return_lse=True)
    expected = case.run("fused", inputs)[1:]
    got = torch.autograd.grad(out, inputs, case.grad.float(), retain_graph=True)
    assert_same(got, expected, 0.0)
    with pytest.raises(NotImplementedError, match="lse has no gradient in the backend fused"):
        (out.sum() + lse.sum()).backward()


def test_fire_dropout_and_short_sequences():
    """A bias by position; dropout, which lse does not contain; P kept for the backward pass."""
    for terms, queries in ((("fire",), 40), (("bias",), 20)):
        case = Case(terms, 2, 2, queries, size=8)
        exact = results(case, "eager", EXACT, gradients=True)
        assert_same(results(case, "blocked", EXACT, gradients=True), exact, 1e-11)
    _, lse = case.out("blocked", case.inputs, return_lse=True, dropout_p=0.5)
    assert_same([lse], [exact[1]], 1e-12)


def test_what_returns_no_lse_is_named():
    case = Case((), 1, 1, 5)
    with pytest.raises(AttentionError, match="sdpa returns no lse; use auto, eager, blocked, fuse"):
        case.out("sdpa", case.inputs, return_lse=True)


def test_values_of_another_size_single_rows_and_empty_batches():
    pos = load("kerple_log")
    q, k, v = torch.randn(3, 2, 2, 7, 8, dtype=EXACT).unbind()
    theta = pos.initial_theta(2).double()
    _, expected = attend(q, k, v, pos, theta, return_lse=True, backend="eager")
    for size in (3, 8, 11):
        other = torch.randn(2, 2, 7, size, dtype=EXACT)
        out, lse = attend(q, k, other, pos, theta, return_lse=True)
        assert out.shape[-1] == size
        assert_same([lse], [expected], 1e-12)
    _, last = attend(q[:, :, 6:], k, v, pos, theta, query_offset=6, return_lse=True)
    assert_same([last], [expected[:, :, 6:]], 1e-12)
    _, none = attend(q[:0], k[:0], v[:0], pos, theta, return_lse=True)
    assert none.shape == (0, 2, 7)


@pytest.mark.parametrize("backend", ["blocked", "fused"])
def test_compiled_code_breaks_the_graph_for_it(backend):
    case = Case(("bias",), 1, 1, 9, size=8)
    inputs = case.rounded(torch.float32)

    def call(*inputs):
        return case.out(backend, [inputs[0] * 2, *inputs[1:]], return_lse=True)

    torch._dynamo.reset()
    got = torch.compile(call, backend="eager")(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(got, call(*inputs), strict=True))
