"""Test the translation of torch formulas to expressions and to FlexAttention's score_mod."""

from __future__ import annotations

import pytest
import sympy
import torch

from megatron.attention.flex import score_mod_of, tabulated
from megatron.attention.formulas.trace import Unreadable, read, torch_function
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
