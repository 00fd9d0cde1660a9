"""Rewrite expressions of distance kernels in terms of the functions that a GPU has.

Logarithms, exponentials and general powers become `lg2` (log2 x) and `ex2` (2^x). A power x^y is
refused if 2^(y log2 x) would be wrong for some theta.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from itertools import product
from typing import Any

import sympy

LN2, LOG2E = sympy.Float(math.log(2.0)), sympy.Float(1.0 / math.log(2.0))
NAMES = ("lg2", "lg2_or_finite", "ex2", "rcp_any")
LG2, LG2_OR_FINITE, EX2, RCP_ANY = (sympy.Function(name) for name in NAMES)
HALVES = (sympy.Rational(1, 2), sympy.Rational(-1, 2))
Bounds = dict[sympy.Symbol, tuple[float, float]]  # the smallest and the largest number
FAR = 1e6  # the largest distance, and the largest number of theta where it has no bound


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
    """Sympy function larger(x, y, t) = max(x, y).

    Where x = y, its derivative is t times the derivative of x plus 1 - t times the derivative of y.
    """

    nargs, is_real = 3, True

    @classmethod
    def eval(cls, x: Any, y: Any, t: Any) -> Any:
        if x.is_number and y.is_number:
            return sympy.Max(x, y)

    def _eval_is_nonnegative(self) -> bool | None:
        return True if any(each.is_nonnegative for each in self.args[:2]) else None

    def fdiff(self, argindex: int = 1) -> Any:
        x, y, t = self.args
        of_x: Any = select(y, x, 1, select(x, y, 0, t))
        return of_x if argindex == 1 else 1 - of_x


class hidden_slope(sympy.Function):
    """Sympy function: the derivative of `hidden_layer` with respect to its first argument u.

    The arguments are those of `hidden_layer`.
    """


class hidden_layer(sympy.Function):
    """Sympy function sum_k v_k relu(w_k u + b_k). The arguments are u, all w, all b, all v."""

    @property
    def columns(self) -> tuple[tuple[Any, ...], ...]:
        """Three tuples of symbols: all w, all b and all v."""
        width = len(self.args) // 3
        return tuple(self.args[1 + n * width :][:width] for n in range(3))

    def fdiff(self, argindex: int = 1) -> Any:
        if argindex != 1:
            raise NotExpressible("w, b and v must be columns of theta")
        return hidden_slope(*self.args)


class NotExpressible(ValueError):
    """A bias or factor contains a function or a power that the generated code cannot compute.

    A power is refused if the generated code would compute it wrongly for some theta. The error
    message names the function or the power.
    """


def lower(expr: Any, d: sympy.Symbol, known: Bounds) -> sympy.Expr:
    """Return `expr` with log, exp and powers expressed by functions that a GPU has.

    Logarithms become `lg2` (log2 x), and exponentials become `ex2` (2^x). A power also becomes
    `ex2`, unless `direct` accepts its exponent.

    Args:
        d: The symbol of the distance.
        known: The bounds of symbols.
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
    """Find the layer of hidden units, sum_k v_k relu(w_k u + b_k), in the expression `expr`.

    Returns:
        The input u, and three tuples of indices in theta: those of all w, of all b and of all v.
        None if there is no layer.

    Raises:
        NotExpressible: There are several layers, or `expr` uses a w, b or v outside of the layer.
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
    """Return a lower and an upper bound of `expr`, which are infinite if no bounds are found.

    `known` contains the bounds of symbols. An unknown symbol is at most FAR in size.
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
    """Return whether the generated code may compute 1 / `expr` by `rcp` instead of `rcp_any`.

    `rcp` is faster, but multiplies two neighbouring numbers, whose product must not overflow.
    Therefore `expr` must surely be between 1e-19 and 1e19 in size.
    """
    low, high = bounds_of(expr, known)
    return (low > 1e-19 and high < 1e19) or (low > -1e19 and high < -1e-19)


def confirm_power(power: sympy.Pow, d: sympy.Symbol, known: Bounds) -> None:
    """Check that the generated code computes a power x^y correctly for every theta and distance.

    The code computes the power as 2^(y log2 x), unless `direct` accepts y. One of these conditions
    must hold:

    - `direct` accepts y;
    - x is always positive;
    - y is a number, and x is never negative;
    - y > 0, x depends only on the distance d, and x is 0 only at d = 0.

    If x may be 0 at d = 0, the generated code replaces log2 0 by a finite number.

    Args:
        power: The power x^y.
        d: The symbol of the distance.
        known: The bounds of symbols.

    Raises:
        NotExpressible: None of the conditions holds.
    """
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
    """Return an expression of the logarithm of `lowered` to base 2.

    If `arg` may be 0, but not negative, at the distance d = 0, the expression has a finite value
    there.

    Args:
        arg: The expression before `lower` has rewritten it.
        lowered: The same expression after `lower` has rewritten it.
    """
    near = arg.subs(d, 0)  # not guarded if it may be negative, because NaN must be visible
    guarded = near.is_nonnegative and not near.is_positive
    return (LG2_OR_FINITE if guarded else LG2)(lowered)
