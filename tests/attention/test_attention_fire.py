"""Test FIRE, whose bias depends on the query's position in its document, in every backend."""

from __future__ import annotations

import pytest
import torch

from megatron.attention import AttentionError, Call, attend, choose
from megatron.positional import load
from tests.attention.test_attention_terms import STARTS, B, E, H, T, decay, inputs

FIRE = {"length": 5, "width": 3}
POSITIONS = torch.arange(T) - STARTS
OPTIONS = {
    "plain": {},
    "documents": {"starts_BS": STARTS},
    "given positions": {"positions_BT": 2 * POSITIONS, "window": 3},
    "documents and a gate": {"starts_BS": STARTS, "decay_BHS": decay()},
}


def theta_of(pos):
    generator = torch.Generator().manual_seed(2)
    theta = pos.initial_theta(H, generator).double()
    return (theta + 0.1 * torch.rand(theta.shape, generator=generator)).requires_grad_()


@pytest.mark.parametrize("case", ["plain", "documents", "given positions"])
def test_eager_is_the_formula(case):
    pos, options = load("fire", **FIRE), OPTIONS[case]
    theta, (q, k, v) = theta_of(pos), inputs()
    got = attend(q, k, v, pos, theta, scale=0.4, backend="eager", **options)
    out = torch.zeros(B, H, T, E, dtype=torch.float64)
    for b, h, i in ((b, h, i) for b in range(B) for h in range(H) for i in range(T)):
        first = STARTS[b, i].item() if "starts_BS" in options else 0
        first = max(first, i - options.get("window", T))
        at = POSITIONS[b, i] if "starts_BS" in options else torch.tensor(i)
        at = options["positions_BT"][b, i] if "positions_BT" in options else at
        d = i - torch.arange(first, i + 1)
        c, factor, w, bias, value = theta[h].split([1, 1, 3, 3, 3])
        u = torch.log(1 + c * d) / torch.log(1 + c * torch.maximum(5 * factor, at))
        units = torch.relu(w[:, None] * u + bias[:, None])
        scores = 0.4 * k[b, h, first : i + 1] @ q[b, h, i] + value @ units
        out[b, h, i] = torch.softmax(scores, 0) @ v[b, h, first : i + 1]
    torch.testing.assert_close(got, out, rtol=0, atol=1e-13)


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("name", ["fire", "kerple_log + fire + gaussian_mul + sink + rotary"])
@pytest.mark.parametrize("queries", [T, 4])
def test_blocked_has_the_values_and_gradients_of_eager(name, case, queries):
    pos, options = load(name, **({"fire": FIRE} if "+" in name else FIRE)), dict(OPTIONS[case])
    if "positions_BT" in options:
        options["positions_BT"] = options["positions_BT"][:, T - queries :]
    results = []
    for backend in ("eager", "blocked"):
        q, k, v = (x.requires_grad_() for x in inputs())
        theta = theta_of(pos)
        chosen = choose(backend, pos, device_type="cpu", dtype=q.dtype, masked=True)
        offset = T - queries
        q_end, more = q[:, :, offset:], {"query_offset": offset, **options}
        out = chosen(Call(q_end, k, v, pos, theta, scale=0.4, **more))
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, theta))])
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("backend", ["flex", "sdpa"])
def test_evaluation_in_other_backends(backend, case):
    pos, options = load("fire + kerple_log", fire=FIRE), OPTIONS[case]
    theta, qkv = theta_of(pos), inputs()
    with torch.no_grad():
        got, exact = (
            attend(*qkv, pos, theta, scale=0.4, backend=each, **options)
            for each in (backend, "eager")
        )
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-12)


def test_flex_refuses_what_no_table_can_hold():
    request = {"device_type": "cpu", "dtype": torch.float32, "training": False}
    with pytest.raises(AttentionError, match=r"flex cannot read the formula of fire \+ rpe"):
        choose("flex", load("fire + rpe"), **request)


def test_second_derivatives_of_eager():
    """The layer of hidden units computes its backward pass itself."""
    pos = load("fire", **FIRE)
    d = torch.arange(1.0, 4.0, dtype=torch.float64)
    theta = theta_of(pos)
    assert torch.autograd.gradgradcheck(lambda x: pos.bias_at(x, d, d + 4), theta)
