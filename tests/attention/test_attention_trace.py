"""Test the translation of torch formulas to expressions and to FlexAttention's score_mod."""

from __future__ import annotations

import pytest
import sympy
import torch

from megatron.attention.flex import score_mod_of, tabulated
from megatron.attention.formulas.trace import Unreadable, confirm, read, torch_function
from megatron.positional import PositionalEmbedding, ThetaParameter, load, names

DISTANCE = [name for name in names() if load(name).kind == "distance"]


@pytest.mark.parametrize(
    "name,bias,weight",
    [
        ("kerple_log", "-theta_0*log(1 + theta_1*d)", None),
        ("kerple_log3", "-theta_0*log(1 + theta_1*d**theta_2)", None),
        ("kerple_power", "-theta_1*d**theta_0", None),
        ("kerple_power_mul", None, "exp(-theta_1*d**theta_0)"),
        ("kerple_power_add_mul", "-theta_1*d**theta_0", "exp(-theta_3*d**theta_2)"),
        ("alibi", "-theta_0*d", None),
        ("gaussian", "theta_0*(exp(-theta_1*d**2) - 1)", None),
        ("gaussian3", "theta_0*(exp(-theta_1*d**theta_2) - 1)", None),
        ("gaussian_mul", None, "exp(-theta_0*d**2)"),
        (
            "kerple_sum",
            "-theta_0*log(1 + theta_1*d) - theta_3*d**theta_2 - theta_5*d**theta_4",
            None,
        ),
        ("rotary", None, None),
    ],
)
def test_what_is_read(name, bias, weight):
    formula = read(load(name))
    symbols = {symbol.name: symbol for symbol in (formula.distance, *formula.theta)}
    for got, expected in ((formula.bias, bias), (formula.weight, weight)):
        if expected is None:
            assert got is None
        else:
            assert sympy.simplify(got - sympy.sympify(expected, symbols)) == 0


class Odd(PositionalEmbedding):
    kind = "distance"
    parameters = (ThetaParameter("x", low=0.01), ThetaParameter("y"))

    def __init__(self, function):
        self.function = function

    def bias(self, theta_HN, d):
        return self.function(theta_HN, d.to(theta_HN.dtype))


@pytest.mark.parametrize(
    "function,why",
    [
        (lambda theta, d: torch.floor(theta[:, :1] * d), "the operation floor has no place"),
        (lambda theta, d: theta.sum(1)[:, None] * d, "the operation sum has no place"),
        (lambda theta, d: (theta * 2)[:, :1] * d, "uses theta as a whole"),
        (lambda theta, d: theta[:, :1] * d.flip(0), "the operation flip has no place"),
        (lambda theta, d: theta[:, :1] * torch.tensor([1.0, 2, 3, 4, 5]), "tensor of 5 numbers"),
        (lambda theta, d: theta[:, :1] * d / d.max().item(), "cannot be traced"),
        (lambda theta, d: theta[:, 0] * 2, "a formula's value is"),
        (lambda theta, d: theta[:, :1] * (d if d.shape[0] == 5 else d + 1), "not what it computes"),
    ],
)
def test_what_cannot_be_read_says_why(function, why):
    with pytest.raises(Unreadable, match=why):
        read(Odd(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda theta, d: (theta[:, :1] - d).abs() * theta[:, 1:],
        lambda theta, d: torch.sqrt((theta[:, :1] - d - 0.25) ** 2),
        lambda theta, d: torch.maximum(theta[:, :1], d) - torch.minimum(2 * d, theta[:, 1:]),
        lambda theta, d: (
            torch.clamp(theta[:, :1] * d, min=2) + torch.clamp_max(theta[:, 1:] * d, 6)
        ),
        lambda theta, d: torch.clamp(d, theta[:, :1], theta[:, :1] + theta[:, 1:]),
        lambda theta, d: torch.relu(theta[:, :1] - d),
        lambda theta, d: torch.where(d < theta[:, :1], d * theta[:, 1:], 0.1),
        lambda theta, d: theta[:, :1] * torch.where((d >= 1) & (d != 3) | ~(d <= 2), 0.5, 0.25),
        lambda theta, d: ((d == 2) | torch.logical_not(d > 1)) * theta[:, 1:] + d.ne(1).double(),
        lambda theta, d: (theta[:, :1] * d).masked_fill(d.ge(3), -torch.inf),
        lambda theta, d: theta[:, 1:] ** torch.clamp(d - 2, min=0) + torch.full_like(d, 0.7),
    ],
)
def test_piecewise_formulas_are_read(function):
    """Values and gradients are torch's, also where both arguments of a maximum are equal."""
    pos = Odd(function)
    theta, d = torch.tensor([[2.0, 3.0], [1.0, 2.5]]).double().requires_grad_(), torch.arange(7.0)
    formula = read(pos)
    read_bias = torch_function(formula.bias, formula.arguments)
    exact = pos.bias(theta, d.double())
    got = read_bias(d.double(), d.double(), *theta[:, :, None].unbind(1)).expand_as(exact)
    torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(1, 2, exact.numel()).view_as(exact).double()
    results = (torch.autograd.grad((x * weights).sum(), theta) for x in (got, exact))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("other", ["d > 65000", "d == 2", "y <= -3", "y >= 4", "gradient"])
def test_a_reading_is_compared_far_away_and_at_the_bounds_of_theta(other):
    """The embedding differs from the expression x d y at a few places, or in its gradient alone."""

    class Bounded(Odd):
        parameters = (ThetaParameter("x", low=0.01), ThetaParameter("y", low=-3.0, high=4.0))

    def function(theta, d):
        x, y = theta[:, :1], theta[:, 1:]
        if other == "gradient":
            return x.detach() * d * y
        return x * d * y + eval(other) * 0.5

    formula = read(Bounded(lambda theta, d: theta[:, :1] * d * theta[:, 1:]))
    with pytest.raises(Unreadable, match="not what it computes"):
        confirm(Bounded(function), formula)


def test_reading_in_inference_mode():
    """The formula may first be read during an evaluation, in inference mode."""
    with torch.inference_mode():
        assert read(Odd(lambda theta, d: -theta[:, :1] * d)).bias is not None


def test_several_ways_to_write_the_same():
    d, theta = torch.tensor([0.0, 1, 5, 100]), torch.tensor([[0.5, 0.25], [1.5, 2.0]])
    ways = [
        lambda theta, d: -theta[:, :1] * torch.log1p(theta[:, 1:] * d),
        lambda theta, d: theta.select(1, 0)[:, None].neg() * (1 + theta[:, 1, None] * d).log(),
        lambda theta, d: (
            torch.add(0.0, (theta.unbind(1)[0].unsqueeze(1)), alpha=-1)
            * (
                torch.log2(torch.rsub(-theta[:, 1].view(-1, 1) * d, 1.0))
                / torch.log2(torch.e + 0 * d)
            )
        ),
    ]
    values = []
    for way in ways:
        formula = read(Odd(way))
        function = torch_function(formula.bias, (formula.distance, *formula.theta))
        values.append(function(d, *theta[:, :, None].unbind(1)))
        torch.testing.assert_close(values[-1], values[0])
    torch.testing.assert_close(values[0], -theta[:, :1] * torch.log1p(theta[:, 1:] * d))


@pytest.mark.parametrize("make", [score_mod_of, tabulated])
@pytest.mark.parametrize("name", DISTANCE)
def test_score_mod(name, make):
    """Compare single scores with the formula; T5's `rpe` is a table in both."""
    pos = load(name)
    if pos.reads_position:
        return  # no table; test_attention_fire has the formula
    theta = pos.initial_theta(3, torch.Generator().manual_seed(1))
    offset, length = 4, 9
    score_mod = make(pos, theta, offset + length, offset)
    score = torch.tensor(0.7)
    for h in range(3):
        for i in range(length):
            for j in range(offset + i + 1):
                d = torch.tensor([offset + i - j])
                expected = score
                if (weight := pos.weight(theta, d)) is not None:
                    expected = expected * weight[h, 0]
                if (bias := pos.bias(theta, d)) is not None:
                    expected = expected + bias[h, 0]
                got = score_mod(score, *(torch.tensor(x) for x in (0, h, i, j)))
                torch.testing.assert_close(got, expected)
    assert score_mod_of(load("rotary"), None, 5) is None
