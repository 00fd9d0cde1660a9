"""Test generated device functions: values and derivatives at all distances, and source text."""

from __future__ import annotations

import pytest
import sympy
import torch
import triton
import triton.language as tl

from megatron.attention.formulas.trace import confirms_code, read
from megatron.attention.fused import functions_of
from megatron.kernels import lowering
from megatron.kernels.codegen import device_functions
from megatron.kernels.lowering import NotExpressible
from megatron.positional import PositionalEmbedding, ThetaParameter, load
from tests.helpers.embeddings import QUICK
from tests.kernels.cases import DEVICE, check, make

FORMULAS = [
    name
    for name in QUICK
    if load(name).kind == "distance" and not functions_of(load(name))[0].tabulated
]
SCALE = 0.35


@triton.jit
def probe(
    s_ptr, ds_ptr, p_ptr, theta_ptr, y_ptr, gradient_ptr, base, scale,
    f_prepare: tl.constexpr, f_evaluate: tl.constexpr, f_zeros: tl.constexpr,
    f_add: tl.constexpr, f_finish: tl.constexpr, THETA: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Compute y and theta's gradient in a tile whose upper left corner is at distance `base`."""
    r = tl.arange(0, R)[:, None]
    column = tl.arange(0, R)[None, :]
    c = f_prepare(theta_ptr, THETA, scale)
    s = tl.load(s_ptr + r * R + column)
    e = f_evaluate(s, (base + r).to(tl.float32), column.to(tl.float32), 0, c, None)
    tl.store(y_ptr + r * R + column, e[0])
    ds, p = tl.load(ds_ptr + r * R + column), tl.load(p_ptr + r * R + column)
    acc = f_add(f_zeros(R, 8), ds, p, e, tl.float32)
    gradients = f_finish(acc, tl.sum(ds, axis=1), c)
    for n in tl.static_range(THETA):
        tl.store(gradient_ptr + n, gradients[n])


@pytest.mark.parametrize("base", [15, 5000, (1 << 22) + 7, (1 << 23) + 12_345])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_tile_at_any_distance(name, base):
    """Past 2^22, computing with i and j instead of their difference would lose digits."""
    pos, R = load(name), 16
    functions, _ = functions_of(pos)
    theta = (pos.initial_theta(1, torch.Generator().manual_seed(1)) + 0.03).clamp(max=0.5)
    s, ds, p = torch.randn(3, R, R, generator=torch.Generator().manual_seed(2))
    y, gradient = torch.empty(R, R), torch.empty(theta.shape[1])
    on_device = [x.to(DEVICE) for x in (s, ds, p, theta, y, gradient)]
    probe[(1,)](
        *on_device, base, SCALE, functions.prepare, functions.evaluate, functions.zeros,
        functions.add, functions.finish, functions.num_theta, R,
    )  # fmt: skip
    exact_theta = theta.double().requires_grad_()
    d = base + torch.arange(R)[:, None] - torch.arange(R)
    x = SCALE * s.double()
    if functions.weighted:
        x = x * pos.weight(exact_theta, d)[0]
    bias = pos.bias(exact_theta, d)
    x = x if bias is None else x + bias[0]
    ds = ds.double() - ds.double().sum(1, keepdim=True) * p.double()
    (exact,) = torch.autograd.grad((ds * x).sum(), exact_theta)
    y, gradient = on_device[4].cpu().double() * SCALE, on_device[5].cpu().double()
    # What the embedding's own formula loses in fp32, which is most where d^p is largest.
    size = max(1.0, x.abs().max().item())
    assert (y - x).abs().max().item() < 3e-6 * size
    assert (gradient - exact[0]).abs().max().item() < 3e-6 * max(size, exact.abs().max().item()) * R


class Zoo(PositionalEmbedding):
    """Base class of the formulas below."""

    kind = "distance"
    parameters = (ThetaParameter("x", low=0.01), ThetaParameter("y", low=0.01, high=1.5))


class Rational(Zoo):
    def bias(self, theta_HN, d):
        d, x, y = self.columns(theta_HN, d)
        return -x * d / (1.0 + y * d)


class Roots(Zoo):
    def bias(self, theta_HN, d):
        d, x, y = self.columns(theta_HN, d)
        return -x * torch.sqrt(d + y) - torch.rsqrt(1 + d) + y.square()


class Gauss(Zoo):
    def weight(self, theta_HN, d):
        d, x, y = self.columns(theta_HN, d)
        return x * torch.exp(-((d / 8) ** 2) * y) + (1 + d).reciprocal()


class Shared(Zoo):
    """A formula with both parameters in the bias and in the weight."""

    def bias(self, theta_HN, d):
        d, x, y = self.columns(theta_HN, d)
        return -y * torch.log(1 + x * d) / 3

    def weight(self, theta_HN, d):
        d, x, y = self.columns(theta_HN, d)
        return (1 + x * d) ** -y


class Waves(Zoo):
    def bias(self, theta_HN, d):
        d, x, y = self.columns(theta_HN, d)
        return x * torch.cos(y * d) - 0.1 * d + torch.exp2(-x * d) + torch.expm1(-y * d)


class Unused(Zoo):
    """A formula with an unused column of theta, a constant, and several kinds of powers."""

    def bias(self, theta_HN, d):
        d, x, _ = self.columns(theta_HN, d)
        return 2.5 - x * (d**2 / 100 + d**3 / 1e4 + torch.log2(d + 2)) + d**0.5 - 0.01 * d**7 / 1e9


class Squares(Zoo):
    """A formula that indexes theta instead of unpacking its columns."""

    def bias(self, theta_HN, d):
        x, y = theta_HN[:, 0], theta_HN[:, 1:].select(1, 0)
        shape = (-1,) + (1,) * d.dim()
        return -x.reshape(shape) * (d.to(theta_HN.dtype) + y.view(shape)).log()


@pytest.mark.parametrize("kind", Zoo.__subclasses__())
def test_any_formula_of_elementary_functions(kind):
    pos = kind()
    functions, how = functions_of(pos)
    assert not functions.tabulated, how
    check(make(pos, 1, 2, 40, 8))


class Stairs(Zoo):
    """A formula that has no symbolic expression and is therefore tabulated."""

    def bias(self, theta_HN, d):
        d, x, y = self.columns(theta_HN, d)
        return -x * torch.floor(d / 4) - y * torch.where(d > 5, d, 0.0)

    def weight(self, theta_HN, d):
        d, x, y = self.columns(theta_HN, d)
        return torch.exp(-x * torch.floor(d / 3)) * y


def test_any_other_formula_is_tabulated():
    pos = Stairs()
    functions, how = functions_of(pos)
    assert functions.tabulated and "floor" in how
    for shape in ({}, {"keys": 60}):
        check(make(pos, 1, 2, 40, 8, **shape), query_offset=0)
    check(make(pos, 2, 2, 23, 8, keys=50), query_offset=21)


AWKWARD = {
    "a detached theta": lambda d, x, y: -x.detach() * d * y,
    "a negative base": lambda d, x, y: -x * y * (d - 9) ** 5 / 1e4,
    "an exponent of 0 where d = 0": lambda d, x, y: -x * d**y,
    "a base of 0": lambda d, x, y: -((x * d) ** (1 + y)),
    "digits that only log1p keeps": lambda d, x, y: -x * torch.log1p(1e-4 * y * d) / 1e-4,
}
PIECEWISE = {
    "an absolute value": lambda d, x, y: -x * torch.sqrt((d - 10 * y - 0.5) ** 2),
    "a window": lambda d, x, y: torch.where(d < 8, -x * y * d, -torch.inf),
    "a power of a clamp": lambda d, x, y: -x * torch.clamp(d - 4, min=1) ** (1 + y),
}


class Awkward(Zoo):
    parameters = (ThetaParameter("x", low=0.0), ThetaParameter("y", low=0.0))

    def __init__(self, what: str):
        self.what = what

    def bias(self, theta_HN, d):
        return (AWKWARD | PIECEWISE)[self.what](*self.columns(theta_HN, d))


@pytest.mark.parametrize("what", [*AWKWARD, *PIECEWISE])
def test_what_a_generated_kernel_would_get_wrong_is_tabulated(what):
    """In the first head theta is at its bound, where some derivatives divide by 0."""
    pos = Awkward(what)
    functions, how = functions_of(pos)
    assert functions.tabulated == (what in AWKWARD), how
    case = make(pos, 1, 2, 20, 8)
    theta = torch.tensor([[0.0, 0.0], [0.5, 0.73]], device=DEVICE)
    case.inputs[3] = theta.requires_grad_()
    check(case)


def test_the_reciprocal_of_an_exponential_is_taken_alone():
    """Computed in pairs, it would give 0 * inf where the exponential overflows."""

    class Logistic(Zoo):
        def weight(self, theta_HN, d):
            d, x, y = self.columns(theta_HN, d)
            return 1 / (1 + torch.exp(x * d - y)) + (1 + d) ** -4

    source = functions_of(Logistic())[0].source
    assert source.count("rcp_any(") == 1 and source.count("rcp(") == 1
    check(make(Logistic(), 1, 1, 20, 8))


class Hill(Zoo):
    """1 + y d^4 exceeds 1e19 beyond the distance 56,000."""

    def bias(self, theta_HN, d):
        d, x, y = self.columns(theta_HN, d)
        return -x * y * d**4 / (1 + y * d**4)


def test_reciprocals_that_could_overflow_are_taken_alone():
    """The product of two neighbours would exceed 3e38. d^8 in the derivative would do so, too."""
    source = functions_of(Hill())[0].source
    assert source.count("rcp_any(") == 1 and "rcp(" not in source
    check(make(Hill(), 1, 1, 20, 8))


@pytest.mark.parametrize(
    "fault", [("paired", lambda *_: True), ("bounds_of", lambda *_: (-1.0, 1.0))]
)
def test_generated_code_is_compared_with_torch(fault, monkeypatch):
    """At distances up to 1e6. Otherwise a formula is tabulated; so no result is silently wrong."""
    good = functions_of.__wrapped__(Hill())
    monkeypatch.setattr(lowering, *fault)
    functions, how = functions_of.__wrapped__(Hill())
    if fault[0] == "paired":
        assert functions.tabulated and "not exact enough" in how
    else:  # nothing is known about bounds: slower, but right
        assert functions.source == good[0].source


@pytest.mark.parametrize("name", FORMULAS)
def test_simulated_code_is_right_for_every_name(name):
    assert confirms_code(load(name), functions_of(load(name))[0])


def test_bounds_of_expressions():
    d, x = sympy.Symbol("d", nonnegative=True), sympy.Symbol("x", real=True)

    def bounds(expr, high=4.0):
        return lowering.bounds_of(expr, {d: (0.0, high), x: (-2.0, 3.0)})

    assert bounds(1 + x * d) == (-7.0, 13.0)
    assert bounds(sympy.exp(-d) + lowering.larger(x, 1, 1)) == pytest.approx(
        (1 + 0.018316, 4.0), 1e-5
    )
    assert bounds(1 / (1 + d**2)) == (1 / 17, 1.0) and bounds((1 + d) ** x) == (1 / 25, 125.0)
    unknown = (-float("inf"), float("inf"))
    for expr in (sympy.exp(d**2), 1 / d, sympy.log(x), x**2, sympy.sin(d), x * sympy.log(d)):
        assert bounds(expr, 1e3) == unknown
    assert bounds(sympy.Symbol("y", positive=True)) == (0.0, lowering.FAR)


def test_an_affine_argument_costs_one_subtraction():
    """The value and its derivatives also share one logarithm."""
    source = functions_of(load("kerple_log"))[0].source
    assert source.count("lg2(") == 1 and source.count("rcp(") == 1
    assert "((1.0 + c[1] * di) - c[1] * dj)" in source
    assert "tl.log" not in source.partition("def evaluate")[2]


def test_powers_of_zero_are_guarded_and_nothing_else():
    for name in ("kerple_power", "kerple_log3"):
        source = functions_of(load(name))[0].source
        assert source.count("lg2_or_finite(") == 1
    assert "finite" not in functions_of(load("kerple_log"))[0].source


def test_equal_formulas_have_equal_sources():
    """Otherwise compiled kernels would never be found in Triton's cache."""
    assert read(load("kerple_log")) == read(load("kerple_log"))
    first, again = (functions_of.__wrapped__(load("kerple_power_add_mul"))[0] for _ in range(2))
    assert first.source == again.source
    assert first.evaluate.fn.__code__.co_filename == again.evaluate.fn.__code__.co_filename


def test_what_has_no_counterpart_is_named():
    d, x = sympy.Symbol("d", nonnegative=True), sympy.Symbol("x", positive=True)
    with pytest.raises(NotExpressible, match="erf has no counterpart"):
        formula = lowering.Formula(-x * sympy.erf(d), None, d, (x,), sympy.Symbol("i"))
        device_functions("error", formula)
