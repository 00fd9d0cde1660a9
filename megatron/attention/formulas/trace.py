"""Read a distance kernel's torch formula as a symbolic expression.

A distance kernel is a bias or a factor that depends on the query-key distance. `read` runs the
embedding's methods `bias_at` and `weight` on a few numbers under torch's tracer, and translates the
recorded operations to sympy. The result has one symbol for the distance and one for each column of
theta. From this expression `megatron.kernels.codegen` generates Triton device functions with their
derivatives, and `flex` makes FlexAttention's score_mod.

Some biases also depend on the query's position i, and so does the factor if there is a temperature.
The expression then has a symbol for i. A layer of hidden units (as in FIRE) becomes a single sympy
function.

A formula has a symbolic expression only if it treats each distance and each head separately. A
lookup in a table, as in T5's bias, has none. Before an expression is used, it is evaluated at other
numbers and compared with the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.attention.formulas.torch_to_sympy import Reader, Unreadable
from megatron.positional import PositionalEmbedding

if TYPE_CHECKING:
    import sympy

DTYPES = (torch.float64, torch.float32)
PROBES = (0.0, 1.0, 3.0, 17.0, 250.0, 4099.0)


@dataclass(frozen=True)
class Formula:
    """A distance kernel as sympy expressions of the distance and the kernel's parameters theta.

    `bias` is added to the scaled query-key product. If it is None, the bias is 0. `weight` is the
    factor by which this product is multiplied. If it is None, the factor is 1.
    """

    bias: sympy.Expr | None
    weight: sympy.Expr | None
    distance: sympy.Symbol
    theta: tuple[sympy.Symbol, ...]
    position: sympy.Symbol

    @property
    def arguments(self) -> tuple[sympy.Symbol, ...]:
        """The symbols in the formula: the distance d, the position i and the columns of theta."""
        return self.distance, self.position, *self.theta


@lru_cache(maxsize=64)
def read(pos: PositionalEmbedding) -> Formula:
    """Return the embedding's formula as symbolic expressions.

    The factor includes the embedding's temperature, if there is one. If the embedding has neither a
    distance kernel nor a temperature, the returned formula has bias 0 and factor 1.

    Raises:
        Unreadable: The formula has no expression. Its values can still be tabulated.
    """
    import sympy

    distance, position = (sympy.Symbol(name, nonnegative=True) for name in ("d", "i"))
    if not (pos.has("distance") or pos.has("temperature")):
        return Formula(None, None, distance, (), position)
    theta = tuple(
        sympy.Symbol(f"theta_{n}", **assumed(column.low)) for n, column in enumerate(pos.parameters)
    )
    reader = Reader(distance, theta, position)
    # Not in the caller's modes: the default device of a plan is meta, which has no values.
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        bias, weight = (reader.expression(part) for part in parts_of(pos))
        formula = Formula(bias, weight, distance, theta, position)
        confirm(pos, formula)
    return formula


def parts_of(pos: PositionalEmbedding) -> tuple[Callable[..., Tensor | None], ...]:
    """Return two functions of (theta, distances d, positions i), for the bias and the factor."""
    return pos.bias_at, pos.weight_at


def assumed(low: float) -> dict[str, bool]:
    """Return what sympy may assume about a parameter >= `low`, such as {"positive": True}."""
    if low < 0:
        return {"real": True}
    return {"positive": True} if low > 0 else {"nonnegative": True}


def confirm(pos: PositionalEmbedding, formula: Formula) -> None:
    """Check that `formula`, which was read from `pos` at a few inputs, is correct at other inputs.

    In fp64, the formula and the embedding must give equal values and equal gradients with respect
    to theta (the kernel's parameters). In fp32, the error of a formula's value may be at most 8
    times the error of the embedding's value, plus 1e-5 max(1, |value|).

    Raises:
        Unreadable: The formula and the embedding differ, or the formula cannot be evaluated.
    """
    generator = torch.Generator().manual_seed(1)
    theta_HN = torch.rand(5, len(formula.theta), generator=generator, dtype=torch.float64) + 0.2
    bounds = [(column.low, column.high) for column in pos.parameters]
    theta_HN = theta_HN.clamp(*torch.tensor(bounds, dtype=torch.float64).view(-1, 2).unbind(1))
    d = torch.tensor(PROBES, dtype=torch.float64)
    for expression, function in zip((formula.bias, formula.weight), parts_of(pos), strict=True):
        if expression is None:
            continue
        try:
            read_function = torch_function(expression, formula.arguments)
            exact, exact32 = (sample(function, theta_HN, d, dtype) for dtype in DTYPES)
            got, got32 = (sample(by_columns(read_function), theta_HN, d, dtype) for dtype in DTYPES)
        except (AttributeError, TypeError, RuntimeError) as error:  # Abs, or a complex number
            raise Unreadable(f"{expression} cannot be evaluated: {error}") from error
        if not all(torch.allclose(x, y, 1e-9, 1e-12) for x, y in zip(got, exact, strict=True)):
            raise Unreadable(f"the expression read, {expression}, is not what it computes")
        lost, unavoidable = ((x[0] - exact[0]).abs() for x in (got32, exact32))
        if not (lost <= 8 * unavoidable + 1e-5 * exact[0].abs().clamp(min=1.0)).all():
            raise Unreadable(f"{expression} loses digits in fp32")


def by_columns(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of (theta_HN, d, i) that calls `function(d, i, *columns of theta)`."""
    return lambda theta_HN, d, i: function(d, i, *(x[:, None] for x in theta_HN.unbind(1)))


def sample(
    function: Callable[..., Tensor | None], theta_HN: Tensor, d: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Evaluate `function` in `dtype`. Return its values and a gradient, both as fp64.

    Let f be a weighted sum of the values at the first four distances. The returned gradient is the
    gradient of f with respect to theta (the kernel's parameters).
    """
    theta_HN, d = theta_HN.to(dtype, copy=True).requires_grad_(), d.to(dtype)
    # At large distances an exponential may overflow, also in torch's gradient.
    i = d + 3 * d.flip(0)
    value, near = (
        torch.as_tensor(function(theta_HN, d[some], i[some]), dtype=dtype)
        for some in (slice(None), slice(4))
    )
    value, near = value.expand(len(theta_HN), len(d)), near.expand(len(theta_HN), 4)
    gradient = torch.zeros_like(theta_HN)
    if near.requires_grad:
        weights = torch.linspace(1.0, 2.0, near.numel(), dtype=dtype).view_as(near)
        gradient = torch.autograd.grad((near * weights).sum(), theta_HN)[0]
    return value.detach().double(), gradient.double()


@lru_cache(maxsize=128)
def torch_function(expression: sympy.Expr, arguments: tuple[sympy.Symbol, ...]) -> Callable:
    """Return a function that evaluates the expression on tensors of any broadcastable shapes.

    The function does not use sympy, so that `torch.compile` can trace it. The result is cached,
    because `torch.compile` would compile every new function object again.
    """
    names = [symbol.name for symbol in arguments]
    return eval(f"lambda {', '.join(names)}: {torch_text(expression)}", {"torch": torch})


def torch_text(expression: Any) -> str:
    """Return the sympy expression as Python code that calls torch."""
    if expression.is_number:
        return f"({float(expression)!r})"
    if expression.is_Symbol:
        return expression.name
    args = [torch_text(arg) for arg in expression.args]
    if expression.is_Add:
        return f"({' + '.join(args)})"
    if expression.is_Mul:
        return f"({' * '.join(args)})"
    if expression.is_Pow and expression.base.is_number:
        return f"torch.exp({math.log(expression.base)!r} * {args[1]})"
    if expression.is_Pow:
        return f"({args[0]} ** {args[1]})"
    if len(args) > 1:  # a hidden layer
        units = zip(*expression.columns, strict=True)
        units = (f"{v} * torch.relu({w} * u + {b})" for w, b, v in units)
        return f"(lambda u: {' + '.join(units)})({args[0]})"
    return f"torch.{type(expression).__name__}({args[0]})"
