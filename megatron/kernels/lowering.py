"""Rewrite expressions of distance kernels so that they use only functions that a GPU can compute.

Logarithms, exponentials and general powers become `lg2` (log2 x) and `ex2` (2^x). A power x^y is
refused if 2^(y log2 x) would be wrong for some theta.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import sympy

LN2, LOG2E = sympy.Float(math.log(2.0)), sympy.Float(1.0 / math.log(2.0))
NAMES = ("lg2", "lg2_or_finite", "ex2", "rcp_any")
LG2, LG2_OR_FINITE, EX2, RCP_ANY = (sympy.Function(name) for name in NAMES)
HALVES = (sympy.Rational(1, 2), sympy.Rational(-1, 2))
Bounds = dict[sympy.Symbol, tuple[float, float]]  # the smallest and the largest number
FAR = 1e6  # the largest distance, and the largest number of theta where it has no bound


@dataclass(frozen=True)
class Formula:
    """The bias and the weight of a positional embedding, as sympy expressions.

    A logit is weight * s + bias, where s is the scaled query-key product.

    Attributes:
        bias: The bias. None means 0.
        weight: The weight. None means 1.
        distance: The symbol of the query-key distance.
        theta: The symbols of the embedding's parameters.
        position: The symbol of the query's position.
    """

    bias: sympy.Expr | None
    weight: sympy.Expr | None
    distance: sympy.Symbol
    theta: tuple[sympy.Symbol, ...]
    position: sympy.Symbol

    @property
    def arguments(self) -> tuple[sympy.Symbol, ...]:
        """The symbols in the formula: the distance, the query's position and the parameters."""
        return self.distance, self.position, *self.theta


class select(sympy.Function):
    """Sympy function select(x, y, a, b): a if x < y, and b otherwise."""

    nargs, is_real = 4, True

    @classmethod
    def eval(cls, x: Any, y: Any, a: Any, b: Any) -> Any:
        if a == b:
            return a
        if x.is_number and y.is_number:
            return a if x < y else b

    def _eval_derivative(self, symbol: sympy.Symbol) -> Any:
        x, y, a, b = self.args
        return select(x, y, sympy.diff(a, symbol), sympy.diff(b, symbol))


class larger(sympy.Function):
    """Sympy function larger(x, y, t) = max(x, y). Its derivative at x = y is t x' + (1 - t) y'."""

    nargs, is_real = 3, True

    @classmethod
    def eval(cls, x: Any, y: Any, t: Any) -> Any:
        if x.is_number and y.is_number:
            return sympy.Max(x, y)

    def _eval_is_nonnegative(self) -> bool | None:
        return True if any(each.is_nonnegative for each in self.args[:2]) else None

    def fdiff(self, argindex: int = 1) -> Any:
        x, y, t = self.args
        # Where x = y: t times the derivative of x, plus 1 - t times the derivative of y.
        of_x: Any = select(y, x, 1, select(x, y, 0, t))
        return of_x if argindex == 1 else 1 - of_x


class hidden_slope(sympy.Function):
    """Sympy function: the derivative of a hidden layer of ReLU units."""


class hidden_layer(sympy.Function):
    """Sympy function sum_k v_k relu(w_k u + b_k). The arguments are u, all w, all b, all v."""

    @property
    def columns(self) -> tuple[tuple[Any, ...], ...]:
        """The symbols of the layer's parameters, which are columns of theta.

        The layer is sum_k v_k relu(w_k u + b_k). The result is (all w_k, all b_k, all v_k).
        """
        width = len(self.args) // 3
        return tuple(self.args[1 + n * width :][:width] for n in range(3))

    def fdiff(self, argindex: int = 1) -> Any:
        if argindex != 1:
            raise NotExpressible("w, b and v must be columns of theta")
        return hidden_slope(*self.args)


class NotExpressible(ValueError):
    """The formula of a positional embedding has a part that the generated code cannot compute."""


def lower(expr: Any, d: sympy.Symbol, known: Bounds) -> sympy.Expr:
    """Rewrite `expr` so that it uses only functions that a GPU can compute, such as log2 and 2^x.

    Args:
        d: The symbol of the query-key distance.
        known: The smallest and the largest value of each symbol.
    """
    if not expr.args:
        return expr
    args = [lower(arg, d, known) for arg in expr.args]
    if isinstance(expr, sympy.exp):
        return EX2(LOG2E * args[0])
    if isinstance(expr, sympy.log):
        return LN2 * log2(expr.args[0], args[0], d)
    if expr.is_Pow and not direct(expr.exp):
        return EX2(args[1] * log2(expr.base, args[0], d))
    reciprocal = expr.is_Pow and expr.exp.is_Integer and expr.exp < 0 and expr.base.has(d)
    if reciprocal and not paired(expr.base, known):
        return RCP_ANY(args[0]) ** -expr.exp
    return expr.func(*args)


def layers(expr: sympy.Expr, theta: tuple[sympy.Symbol, ...]) -> tuple | None:
    """Find a hidden layer, sum_k v_k relu(w_k u + b_k), in an expression.

    Returns:
        None if there is no layer. Otherwise u, and the indices in `theta` of all w, of all b and of
            all v.

    Raises:
        NotExpressible: There are several layers, or a w, b or v also occurs outside of the layer.
    """
    found = list(expr.atoms(hidden_layer))
    if not found:
        return None
    layer, places = found[0], {symbol: n for n, symbol in enumerate(theta)}
    rest = expr.subs(layer, 0)
    if len(found) > 1 or (rest.free_symbols | layer.args[0].free_symbols) & set(layer.args[1:]):
        raise NotExpressible("the generated code has one layer of hidden units, of own columns")
    return layer.args[0], *(tuple(places[x] for x in each) for each in layer.columns)


RISING: dict[type, Callable[..., float]] = {
    sympy.Add: lambda *terms: sum(terms), sympy.Mul: lambda *factors: math.prod(factors),
    sympy.Pow: pow, sympy.exp: math.exp, sympy.log: math.log, larger: lambda x, y, t: max(x, y),
}  # fmt: skip
"""Functions that rise or fall in each argument. So their bounds are at bounds of the arguments."""


def bounds_of(expr: Any, known: Bounds) -> tuple[float, float]:
    """Return a lower and an upper bound of an expression, which may be infinite.

    Args:
        known: The smallest and the largest value of each symbol.
    """
    if expr.is_number:
        return float(expr), float(expr)
    if expr.is_Symbol:
        low, high = known.get(expr, (0.0 if expr.is_nonnegative else -FAR, FAR))
        return max(low, -FAR), min(high, FAR)
    ends, values = [bounds_of(arg, known) for arg in expr.args], [math.nan]
    if expr.func in RISING and not (expr.is_Pow and ends[0][0] < 0.0):
        with suppress(OverflowError, ValueError, ZeroDivisionError):
            values = [RISING[expr.func](*corner) for corner in product(*ends)]
    return (-math.inf, math.inf) if any(map(math.isnan, values)) else (min(values), max(values))


def paired(expr: Any, known: Bounds) -> bool:
    """Return whether generated code may compute 1 / expr by the function `rcp`.

    `rcp` multiplies two neighbouring numbers of a tile. This product must not overflow.
    """
    low, high = bounds_of(expr, known)
    return (low > 1e-19 and high < 1e19) or (low > -1e19 and high < -1e-19)


def confirm_power(power: sympy.Pow, d: sympy.Symbol, known: Bounds) -> None:
    """Check that the generated code computes a power correctly for all values of its symbols.

    Args:
        d: The symbol of the query-key distance.
        known: The smallest and the largest value of each symbol.

    Raises:
        NotExpressible: The code may compute the power wrongly.
    """
    # The code computes x^y as 2^(y log2 x), or by products, roots and reciprocals (`direct`). For
    # x = 0 at d = 0, it replaces log2 0 by a finite number.
    base, exponent = power.args
    low, _ = bounds_of(base, known)
    if exponent.is_number:
        sound = direct(exponent) or base.is_nonnegative or low >= 0.0
    elif base.subs(d, 0).is_zero:
        far = base.subs(d, sympy.Symbol("far", positive=True))
        sound = far.is_positive and exponent.is_positive and base.free_symbols == {d}
    else:
        sound = low > 0.0
    if not sound:
        raise NotExpressible(f"{power} is not safe for every theta within its bounds")


def direct(exponent: sympy.Expr) -> bool:
    """Return whether a power with this exponent is computed by products, roots or reciprocals."""
    return exponent in HALVES or (exponent.is_Integer and abs(exponent) <= 4)


def log2(arg: sympy.Expr, lowered: sympy.Expr, d: sympy.Symbol) -> sympy.Expr:
    """Return an expression of the logarithm of `arg` to base 2.

    Args:
        arg: The expression of which the logarithm is taken.
        lowered: The same expression after `lower` has rewritten it.
        d: The symbol of the query-key distance.
    """
    near = arg.subs(d, 0)  # not guarded if it may be negative, because NaN must be visible
    guarded = near.is_nonnegative and not near.is_positive
    return (LG2_OR_FINITE if guarded else LG2)(lowered)
