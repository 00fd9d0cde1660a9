"""Formulas as users write them: with raw distances, without parameters, in combinations."""

from __future__ import annotations

import pytest
import torch

from megatron.attention import AttentionError, attend, score_mod_of
from megatron.positional import (
    Combination,
    PositionalEmbedding,
    ThetaParameter,
    load,
)

BACKENDS = ("eager", "blocked", "sdpa", "flex")


class Raw(PositionalEmbedding):
    """b(d) = -a / 2 for d > 5, written with distances that do not come from `columns`."""

    parameters = (ThetaParameter("a", low=0.0),)

    def bias(self, theta_HN, d):
        _, a = self.columns(theta_HN, d)
        return a * torch.where(d > 5, torch.full_like(d, -0.5), torch.zeros_like(d))


class Inverse(Raw):
    """w(d) = a / (d + 1)."""

    def weight(self, theta_HN, d):
        return theta_HN.view(-1, *[1] * d.dim()) * (d + 1) ** -1


class Fixed(PositionalEmbedding):
    """b(d) = -d / 10, without parameters and always in fp32."""

    def bias(self, theta_HN, d):
        return (-0.1 * d).float().expand(theta_HN.shape[0], *d.shape)


def inputs(length=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, 4, length, 8, generator=generator, dtype=torch.float64).unbind(0)


def distances(length=16):
    position = torch.arange(length)
    return (position[:, None] - position).clamp(min=0).double()


def written_out(q, k, v, bias_HTS, weight_HTS=1.0):
    """Causal attention with a bias and a factor, without any code of ours."""
    scores = q @ k.mT / q.shape[-1] ** 0.5 * weight_HTS + bias_HTS
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("backend", BACKENDS)
def test_raw_distances_are_floating_point_numbers(backend):
    q, k, v = inputs()
    theta = torch.rand(4, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1
    bias = theta[..., None] * torch.where(distances() > 5, -0.5, 0.0)
    got = attend(q, k, v, Raw(), theta, backend=backend)
    torch.testing.assert_close(got, written_out(q, k, v, bias))
    if backend != "sdpa":
        weight = theta[..., None] / (distances() + 1)
        got = attend(q, k, v, Inverse(), theta, backend=backend)
        torch.testing.assert_close(got, written_out(q, k, v, bias, weight))


@pytest.mark.parametrize("backend", ["eager", "blocked"])
def test_raw_distances_keep_the_gradient(backend):
    q, k, v = inputs()
    theta = torch.ones(4, 1, dtype=torch.float64, requires_grad=True)
    attend(q, k, v, Raw(), theta, backend=backend).square().sum().backward()
    leaf = torch.ones(4, 1, dtype=torch.float64, requires_grad=True)
    bias = leaf[..., None] * torch.where(distances() > 5, -0.5, 0.0)
    written_out(q, k, v, bias).square().sum().backward()
    assert leaf.grad.abs().min() > 1e-3
    torch.testing.assert_close(theta.grad, leaf.grad)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("terms", ["", "rotary"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_formula_without_parameters(backend, terms, given):
    q, k, v = inputs()
    pos, theta = Fixed(), torch.empty(4, 0) if given else None
    turned = q, k
    if terms:
        pos = Combination([load(terms), pos])
        turned = load(terms).rotate(q, k)
    got = attend(q, k, v, pos, theta, backend=backend)
    torch.testing.assert_close(got, written_out(*turned, v, -0.1 * distances()), atol=1e-6, rtol=0)


class Short(Fixed):
    def bias(self, theta_HN, d):
        return -0.1 * d


class Undeclared(PositionalEmbedding):
    def bias(self, theta_HN, d):
        return -theta_HN[:, :1, None] * d


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_formula_without_parameters_is_checked(backend):
    q, k, v = inputs()
    for theta in (None, torch.empty(4, 0)):
        with pytest.raises(AttentionError, match=r"Short.bias has returned .* the heads first"):
            attend(q, k, v, Short(), theta, backend=backend)
    with pytest.raises(RuntimeError, match=r"Short.bias has returned .* the heads first"):
        torch.compile(lambda q: attend(q, k, v, Short()), backend="eager")(q)


def test_a_formula_without_parameters_in_one_graph():
    q, k, v = inputs()
    pos = Combination([load("rotary"), Fixed()])
    compiled = torch.compile(lambda q: attend(q, k, v, pos), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), attend(q, k, v, pos))


def test_positions_that_nothing_reads():
    q, k, v = inputs()
    positions = 300 * torch.arange(16).expand(2, -1)
    for name in ("kerple_log", "none", "sink + alibi", "sinusoidal"):
        pos = load(name)
        theta = pos.initial_theta(4)
        with pytest.raises(
            AttentionError, match=r"does not read positions_BT.* leave positions_BT"
        ):
            attend(q, k, v, pos, theta, positions_BT=positions)
    for name in ("rotary + kerple_log", "log_n", "fire"):
        pos = load(name)
        theta = pos.initial_theta(4).double()
        moved = attend(q, k, v, pos, theta, positions_BT=positions)
        assert not torch.allclose(moved, attend(q, k, v, pos, theta)), name
        same = attend(q, k, v, pos, theta, positions_BT=positions.double())
        torch.testing.assert_close(same, moved)


def test_a_decay_works_with_every_embedding():
    q, k, v = inputs()
    theta, gate = (
        load("kerple_log").initial_theta(4).double(),
        torch.randn(2, 4, 16, dtype=torch.float64),
    )
    with pytest.raises(AttentionError, match=r"needs decay_BHS: write decay_BHS=pos.decay\(gate\)"):
        attend(q, k, v, load("kerple_log + forget_gate"), theta)
    decay = load("forget_gate").decay(gate)
    p, a = theta.T[:, :, None, None]
    bias = -p * torch.log1p(a * distances()) + decay[..., None] - decay[:, :, None]
    expected = written_out(q, k, v, bias)
    for pos in (load("kerple_log"), load("kerple_log + forget_gate")):
        torch.testing.assert_close(attend(q, k, v, pos, theta, decay_BHS=decay), expected)


class Whole(Raw):
    def bias(self, theta_HN, d):
        return -theta_HN[:, 0] * d


def test_theta_without_columns_is_explained():
    with pytest.raises(AttentionError, match=r"Whole.bias: .* self.columns\(theta_HN, d\) gives d"):
        attend(*inputs(), Whole(), torch.ones(4, 1))


@pytest.mark.parametrize(
    "given",
    [
        ThetaParameter("a"),  # the comma of a tuple is missing
        ("a", "b"),
        (ThetaParameter("a"), ThetaParameter("b"), ThetaParameter("a")),
    ],
)
def test_parameters_without_names_of_their_own(given):
    with pytest.raises(ValueError, match=r"Wrong: write parameters = \(ThetaPara.* name of its"):
        type("Wrong", (Raw,), {"parameters": given})


def test_bounds_in_another_order():
    with pytest.raises(ValueError, match="^a: low must not be greater than high: low=2, high=1$"):
        ThetaParameter("a", low=2.0, high=1.0)
    with pytest.raises(ValueError, match="low=nan"):
        ThetaParameter("a", low=float("nan"))
    fixed = ThetaParameter("a", low=2.0, high=2.0)
    made = type("Constant", (Raw,), {"parameters": [fixed]})()
    assert made.initial_theta(3).tolist() == [[2.0]] * 3


def test_missing_and_undeclared_parameters():
    q, k, v = inputs()
    with pytest.raises(AttentionError, match=r"got \[4, 1\]; declare parameters = \(Th"):
        attend(q, k, v, Undeclared(), torch.ones(4, 1))
    with pytest.raises(AttentionError, match=r"Raw needs theta \[4, 1\], got none$"):
        attend(q, k, v, Raw())
    with pytest.raises(AttentionError, match=r"Raw needs theta \[heads, 1\], got none"):
        score_mod_of(Raw(), None, length=16)


class Flattened(PositionalEmbedding):
    """b(d) = -a log(1 + c d), with theta read as one flat tensor."""

    parameters = (ThetaParameter("a", low=0.01), ThetaParameter("c", low=0.01))

    def bias(self, theta_HN, d):
        a, c = theta_HN.flatten().view(-1, 2, *[1] * d.dim()).unbind(1)
        return -a * torch.log1p(c * d)


class Strided(Flattened):
    """The same formula, with every second number of the flat tensor."""

    def bias(self, theta_HN, d):
        a, c = (theta_HN.reshape(-1)[n::2].view(-1, *[1] * d.dim()) for n in (0, 1))
        return -a * torch.log1p(c * d)


@pytest.mark.parametrize("kind", [Flattened, Strided])
def test_a_formula_may_read_theta_as_one_flat_tensor(kind):
    q, k, v = inputs()
    theta = torch.tensor([[0.3, 0.9], [0.5, 0.2], [1.0, 1.5], [0.1, 2.0]], dtype=torch.float64)
    a, c = theta[:, :, None, None].unbind(1)
    truth = written_out(q, k, v, -a * torch.log1p(c * distances()))
    for backend in BACKENDS:
        torch.testing.assert_close(attend(q, k, v, kind(), theta, backend=backend), truth)


def test_parameters_may_be_a_property():
    columns = property(lambda _: (ThetaParameter("a", low=0.0),))
    assert type("Later", (Raw,), {"parameters": columns})().initial_theta(2).shape == (2, 1)
