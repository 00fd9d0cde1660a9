"""Test blocked attention against eager attention: outputs and all gradients, also theta's."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from megatron.attention import attend
from megatron.attention.tiled import blocked_call, tiles
from megatron.positional import load, within_bounds
from tests.helpers.embeddings import PLAIN

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
NO_THETA = [name for name in PLAIN if load(name).kind != "distance"]
SMALL_TILES = {"BUFFER_ELEMENTS": 700, "MIN_ROWS": 3, "MAX_ROWS": 16}


def make(name, batch, heads, queries, keys, size, dtype=torch.float64, seed=0):
    """Return (pos, [q, k, v] or [q, k, v, theta], gradient of the output)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length):
        return torch.randn(batch, heads, length, size, generator=generator).to(dtype)

    pos, inputs = load(name), [draw(queries), draw(keys), draw(keys)]
    if pos.kind == "distance":
        theta = pos.initial_theta(heads, generator) + 0.05 * torch.rand(heads, 1)
        theta = within_bounds(theta, pos.parameters)
        inputs.append(theta.to(torch.promote_types(dtype, torch.float32)))
    return pos, [x.requires_grad_() for x in inputs], draw(queries)


def run(backend, pos, inputs, grad, **options):
    """Return [output, gradient of each input]."""
    out = attend(*inputs[:3], pos, *inputs[3:], scale=0.35, backend=backend, **options)
    return [out, *torch.autograd.grad(out, inputs, grad)]


def assert_same(got, expected, tolerance):
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert (x - y).abs().max() <= tolerance * max(1.0, y.abs().max().item())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", PLAIN)
def test_every_embedding(name, dtype):
    """With 150 query rows there are two blocks of 75 rows."""
    case = make(name, 2, 3, 150, 150, 8, dtype)
    assert_same(run("blocked", *case), run("eager", *case), TOLERANCE[dtype])


@given(
    name=st.sampled_from(PLAIN),
    batch=st.integers(1, 3),
    heads=st.integers(1, 4),
    queries=st.integers(1, 60),
    offset=st.integers(0, 40),
    later=st.integers(0, 3),
    size=st.integers(1, 9),
    small=st.booleans(),
)
def test_any_shape(name, batch, heads, queries, offset, later, size, small):
    """Incomplete blocks, one row or key, many tiles, cached keys and unused later keys work."""
    keys = offset + queries + later
    size += size % 2 if name == "rotary" else 0  # it turns pairs of dimensions
    case = make(name, batch, heads, queries, keys, size, seed=queries)
    with mock.patch.multiple(tiles, **(SMALL_TILES if small else {"MAX_ROWS": 128})):
        got = run("blocked", *case, query_offset=offset)
    assert_same(got, run("eager", *case, query_offset=offset), 1e-12)


@pytest.mark.parametrize("name", PLAIN)
def test_one_new_query_on_cached_keys(name):
    case = make(name, 2, 3, 1, 40, 8)
    for offset in (0, 1, 39):
        got = run("blocked", *case, query_offset=offset)
        assert_same(got, run("eager", *case, query_offset=offset), 1e-12)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_keeping_the_softmax_changes_no_bit(dropout_p):
    case = make("kerple_log", 2, 3, 70, 70, 16, torch.float32)
    results = []
    for share in (0.0, 100.0, 100.0):
        torch.manual_seed(1)
        with mock.patch.object(blocked_call, "KEPT_SHARE", share):
            results.append(run("blocked", *case, dropout_p=dropout_p))
    for again in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], again, strict=True))


def test_backward_twice():
    pos, inputs, grad = make("kerple_log", 2, 2, 40, 40, 8)
    out = attend(*inputs[:3], pos, inputs[3], scale=0.35, dropout_p=0.2, backend="blocked")
    first = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    second = torch.autograd.grad(out, inputs, grad, create_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(second[0].sum(), inputs[1])


def test_numerical_gradient():
    pos, inputs, _ = make("kerple_power_add_mul", 1, 2, 9, 9, 3)

    def function(*tensors):
        torch.manual_seed(5)  # the same dropout mask at every evaluation
        return attend(*tensors[:3], pos, tensors[3], scale=0.35, dropout_p=0.3, backend="blocked")

    with mock.patch.multiple(tiles, **SMALL_TILES):
        assert torch.autograd.gradcheck(function, inputs)


def test_the_layout_a_model_gives():
    """q, k and v may be slices of one projection's output, which are not contiguous."""
    pos = load("kerple_log")
    theta = pos.initial_theta(4).requires_grad_()
    for batch in (1, 3):
        x = torch.randn(batch, 70, 4 * 3 * 8, requires_grad=True)
        grads = []
        for backend in ("eager", "blocked"):
            q, k, v = x.unflatten(-1, (4, 24)).transpose(1, 2).chunk(3, dim=-1)
            out = attend(q, k, v, pos, theta, scale=0.35, backend=backend).transpose(1, 2)
            grads.append([out, *torch.autograd.grad(out.flatten(2).square().sum(), (x, theta))])
        assert_same(grads[1], grads[0], 1e-5)


def test_some_inputs_without_gradient():
    pos, inputs, grad = make("kerple_power_add_mul", 2, 3, 40, 40, 4)
    full = run("eager", pos, inputs, grad)[1:]
    for wanted in range(4):
        some = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(inputs)]
        out = attend(*some[:3], pos, some[3], scale=0.35, backend="blocked")
        (got,) = torch.autograd.grad(out, some[wanted], grad)
        assert_same([got], [full[wanted]], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_add_mul", "rpe", "none"])
def test_repeatable_bit_for_bit(name, dtype):
    case = make(name, 3, 4, 333, 333, 16, dtype)
    first = None
    for _ in range(4):
        torch.manual_seed(3)
        again = run("blocked", *case, dropout_p=0.1)
        first = first or again
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_large_scores_do_not_overflow():
    """The scores are several thousand, and float64 cannot represent their exponentials."""
    pos, (q, k, v, theta), grad = make("kerple_log", 1, 2, 200, 200, 8)
    case = pos, [(q * 3000).detach().requires_grad_(), k, v, theta], grad
    got = run("blocked", *case)
    assert all(x.isfinite().all() for x in got)
    assert_same(got, run("eager", *case), 1e-9)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_mul", "none"])
def test_dropout_against_an_explicit_mask(name):
    """With v = identity, the output shows the mask; autograd with this mask is the reference."""
    pos, inputs, grad = make(name, 2, 3, 100, 100, 100)
    identity = torch.eye(100).double().expand(2, 3, -1, -1)
    options = {"scale": 0.35, "backend": "blocked"}

    def dropped(v, seed):
        torch.manual_seed(seed)
        return attend(*inputs[:2], v, pos, *inputs[3:], dropout_p=0.2, **options)

    with mock.patch.multiple(tiles, BUFFER_ELEMENTS=15_000), torch.no_grad():
        shown = dropped(identity, 1)
        assert not torch.equal(shown, dropped(identity, 2))
    with mock.patch.multiple(tiles, BUFFER_ELEMENTS=15_000):
        out = dropped(inputs[2], 1)
        got = [out, *torch.autograd.grad(out, inputs, grad)]
    probs = attend(*inputs[:2], identity, pos, *inputs[3:], scale=0.35, backend="eager")
    mask = (shown != 0) / 0.8
    seen = torch.ones(100, 100).tril().bool()
    assert abs((mask[..., seen] > 0).double().mean().item() - 0.8) < 0.01
    assert not torch.equal(mask[0], mask[1]) and not torch.equal(mask[0, 0], mask[0, 1])
    out = (probs * mask) @ inputs[2]
    assert_same(got, [out, *torch.autograd.grad(out, inputs, grad)], 1e-12)


def test_dropout_under_activation_checkpointing():
    """The recomputed forward pass restores the random generator, so both masks are the same."""
    pos, inputs, grad = make("kerple_log", 2, 2, 50, 50, 8)

    def function(*tensors):
        return attend(*tensors[:3], pos, tensors[3], scale=0.35, dropout_p=0.3, backend="blocked")

    results = []
    for call in (function, lambda *x: checkpoint(function, *x, use_reentrant=False)):
        torch.manual_seed(11)
        out = call(*inputs)
        torch.rand(3)
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("backend", ["eager", "blocked"])
def test_autocast_does_not_lower_the_precision(backend):
    pos, inputs, grad = make("kerple_log", 1, 2, 80, 80, 8, torch.float32)
    plain = run(backend, pos, inputs, grad)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*inputs[:3], pos, inputs[3], scale=0.35, backend=backend)
        if backend == "blocked":  # its backward pass is its own, so it can promise this too
            within = torch.autograd.grad(out, inputs, grad, retain_graph=True)
            assert all(torch.equal(x, y) for x, y in zip(plain[1:], within, strict=True))
    outside = torch.autograd.grad(out, inputs, grad)
    assert all(torch.equal(x, y) for x, y in zip(plain, (out, *outside), strict=True))
