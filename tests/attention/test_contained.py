"""Test that a NaN in a key or value stays in the rows that see it, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.attention import attend
from megatron.attention.choice import BACKENDS
from megatron.attention.tiled import blocked_function
from megatron.positional import load
from tests.helpers.terms import Case

QUERIES, KEYS, BAD = 40, 44, 17
MASKS = {
    "causal": {},
    "documents": {"starts_BS": (torch.arange(KEYS) // 10 * 10)[None].expand(2, -1)},
    "window": {"window": 5},
}


def seen(mask):
    """Return which query sees which key, [queries, keys], written out."""
    rows = [[0] * KEYS for _ in range(QUERIES)]
    for row in range(QUERIES):
        own = row + KEYS - QUERIES
        first = {"causal": 0, "documents": own // 10 * 10, "window": max(0, own - 5)}[mask]
        rows[row][first : own + 1] = [1] * (own + 1 - first)
    return torch.tensor(rows, dtype=torch.bool)


def run(case, backend, inputs, grad=None, **options):
    """Return the output and, for a gradient of it, the gradients of the inputs."""
    inputs = [x.detach().clone().requires_grad_(grad is not None) for x in inputs]
    out = case.out(backend, inputs, **options)
    return [out.detach(), *(() if grad is None else torch.autograd.grad(out, inputs, grad))]


def spoiled(case, which, value, at=BAD):
    """Return the inputs of a case, with one bad number in `which` of them."""
    inputs = [x.detach().clone() for x in case.inputs]
    inputs[which][0, 0, at, 3] = value
    return inputs


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "fused"])
def test_rows_that_do_not_see_it_are_exact(backend, mask, value):
    """Two query heads share the bad key head; the other head and the other sequence are exact."""
    terms = () if backend == "sdpa" else ("bias",)
    case = Case(terms, 2, 4, QUERIES, KEYS - QUERIES, size=8, group=2)
    clean = run(case, backend, case.inputs, **MASKS[mask])[0]
    bad_rows = torch.zeros(2, 4, QUERIES, dtype=torch.bool)
    bad_rows[0, :2] = seen(mask)[:, BAD]
    for which in (1, 2):
        (out,) = run(case, backend, spoiled(case, which, value), **MASKS[mask])
        torch.testing.assert_close(out[~bad_rows], clean[~bad_rows], rtol=0, atol=1e-14)
        if math.isnan(value):
            assert out[bad_rows].isnan().all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", ["eager", "blocked"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradients(which, backend, mask):
    """NaN for all that a bad row depends on; exact for all else, if the loss sees all rows."""
    terms = ("bias", "decay")
    case = Case(terms, 2, 4, QUERIES, KEYS - QUERIES, size=8, group=2)
    clean = run(case, backend, case.inputs, case.grad, **MASKS[mask])
    at = BAD if which else BAD - (KEYS - QUERIES)
    inputs = spoiled(case, which, math.nan, at)
    out, dq, dk, dv, dtheta, dc = run(case, backend, inputs, case.grad, **MASKS[mask])
    bad_rows = torch.zeros(2, 4, QUERIES, dtype=torch.bool)
    if which:
        bad_rows[0, :2] = seen(mask)[:, BAD]
    else:
        bad_rows[0, 0, at] = True
    lost_keys = torch.zeros(2, 4, KEYS, dtype=torch.bool)
    lost_keys[0] = (seen(mask) & bad_rows[0, :, :, None]).any(1)
    shared = lost_keys.view(2, 2, 2, KEYS).any(2)
    lost_heads = bad_rows.any(2).any(0)
    pairs = zip((bad_rows, bad_rows, shared, shared, lost_heads, lost_keys), clean, strict=True)
    for got, (lost, expected) in zip((out, dq, dk, dv, dtheta, dc), pairs, strict=True):
        assert got[lost].isnan().all()
        torch.testing.assert_close(got[~lost], expected[~lost], rtol=0, atol=1e-13)
    assert (~shared).any() and (~lost_heads).any()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("backend", ["eager", "blocked"])
def test_gradients_of_rows_that_do_not_see_it_if_no_output_is_nan(backend, value):
    """No row of the loss sees the key, or its score of -inf lets all outputs be finite."""
    q, k, v = torch.rand(3, 1, 1, 6, 4, dtype=torch.float64).unbind()
    exact, bad = q.clone().requires_grad_(), k.clone()
    bad[0, 0, 0] = value
    attend(exact, k, v, load("none"), backend=backend, window=1).sum().backward()
    last = q[:, :, 3:].clone().requires_grad_()
    options = {"backend": backend, "window": 1, "query_offset": 3}
    attend(last, bad, v, load("none"), **options).sum().backward()
    torch.testing.assert_close(last.grad, exact.grad[:, :, 3:], rtol=0, atol=1e-14)
    starts = torch.tensor([[0, 0, 0, 3, 3, 3]])
    bad = k.clone()
    bad[0, 0, 5] = -math.inf
    found = q.clone().requires_grad_()
    attend(found, bad, v, load("none"), backend=backend, starts_BS=starts).sum().backward()
    assert found.grad[0, 0, :5].isfinite().all() and found.grad[0, 0, 5].isnan().all()


def test_a_single_row_with_a_window():
    """Blocked then calls eager; the unseen key does not reach the row."""
    case = Case(("bias",), 1, 1, 1, 30, size=8)
    (clean,) = run(case, "blocked", case.inputs, window=5)
    for which in (1, 2):
        (out,) = run(case, "blocked", spoiled(case, which, math.nan), window=5)
        torch.testing.assert_close(out, clean, rtol=0, atol=1e-14)


def test_lse_and_a_gate():
    """A NaN in the decay reaches the rows that see it, and their lse."""
    case = Case(("decay",), 1, 1, 40, size=8)
    inputs = [x.detach().clone() for x in case.inputs]
    clean = case.out("blocked", inputs, return_lse=True)
    inputs[3][0, 0, 25:] = math.nan
    for got, expected in zip(case.out("blocked", inputs, return_lse=True), clean, strict=True):
        torch.testing.assert_close(got[:, :, :25], expected[:, :, :25], rtol=0, atol=1e-13)
        assert got[:, :, 25:].isnan().all()


def test_fused_keeps_a_bad_key_in_its_rows_forward():
    """Not a bad value, and not backward: a GPU is not asked for numbers in each call."""
    case = Case(("bias",), 1, 1, 40, size=8)
    inputs = case.rounded(torch.float32)
    clean = case.out("fused", inputs)
    with torch.no_grad():
        inputs[1][0, 0, BAD, 3] = math.nan
    out = case.out("fused", inputs)
    assert torch.equal(out[:, :, :BAD], clean[:, :, :BAD]) and out[:, :, BAD:].isnan().all()


def test_finite_numbers_are_computed_once(monkeypatch):
    """Large ones too, whose sum overflows: the second result is the same."""
    calls, made = [], blocked_function.BlockedCall
    counted = lambda *args, **rest: calls.append(1) or made(*args, **rest)  # noqa: E731
    monkeypatch.setattr(blocked_function, "BlockedCall", counted)
    q, k, v = torch.randn(3, 1, 1, 20, 8).unbind()
    pos = Case((), 1, 1, 2).pos
    attend(q, k, v, pos, backend="blocked")
    assert len(calls) == 1
    out = attend(q, k, torch.full_like(v, 3e38), pos, backend="blocked")
    assert len(calls) == 3
    torch.testing.assert_close(out, torch.full_like(out, 3e38))
