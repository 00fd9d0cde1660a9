"""Rewrite expressions of distance kernels in terms of the functions that a GPU has.

Logarithms, exponentials and general powers become `lg2` (log2 x) and `ex2` (2^x). A power x^y is
refused if 2^(y log2 x) would be wrong for some theta.
"""

from __future__ import annotations

import math
from typing import Any

import sympy

LN2, LOG2E = sympy.Float(math.log(2.0)), sympy.Float(1.0 / math.log(2.0))
NAMES = ("lg2", "lg2_or_finite", "ex2", "rcp_any")
LG2, LG2_OR_FINITE, EX2, RCP_ANY = (sympy.Function(name) for name in NAMES)
HALVES = (sympy.Rational(1, 2), sympy.Rational(-1, 2))


class step(sympy.Function):
    """Sympy function of x: 1 if x > 0, and 0 otherwise."""

    nargs = 1


class relu(sympy.Function):
    """Sympy function max(x, 0)."""

    nargs, is_nonnegative = 1, True

    def fdiff(self, argindex: int = 1) -> Any:
        return step(self.args[0])


class hidden_slope(sympy.Function):
    """Sympy function: the derivative of `hidden_layer` with respect to u, its first argument.

    The arguments are those of `hidden_layer`.
    """


class hidden_layer(sympy.Function):
    """Sympy function sum_k v_k relu(w_k u + b_k) of the arguments u, all w, all b and all v."""

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
    """A distance kernel contains a function or a power that the generated code cannot compute.

    A power is refused if the generated code would compute it wrongly for some theta. The error
    message names the function or the power.
    """


def lower(expr: Any, d: sympy.Symbol) -> sympy.Expr:
    """Return `expr` with log, exp and powers rewritten by the functions that a GPU has.

    Logarithms become `lg2` (log2 x). Exponentials become `ex2` (2^x), and so do powers that
    `direct` does not accept. `d` is the symbol of the distance.
    """
    if not expr.args:
        return expr
    args = [lower(arg, d) for arg in expr.args]
    if isinstance(expr, sympy.exp):
        return EX2(LOG2E * args[0])
    if isinstance(expr, sympy.log):
        return LN2 * log2(expr.args[0], args[0], d)
    if expr.is_Pow and not direct(expr.exp):
        return EX2(args[1] * log2(expr.base, args[0], d))
    if expr.is_Pow and expr.exp.is_Integer and expr.exp < 0 and exponential(expr.base, d):
        return RCP_ANY(args[0]) ** -expr.exp
    return expr.func(*args)


def layers(expr: sympy.Expr, theta: tuple[sympy.Symbol, ...]) -> tuple | None:
    """Find the layer of hidden units, sum_k v_k relu(w_k u + b_k), in the expression `expr`.

    Returns:
        The input u and three tuples of indices in theta: those of all w, of all b and of all v. The
        result is None if there is no layer.

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


def exponential(expr: sympy.Expr, d: sympy.Symbol) -> bool:
    """Return whether `expr` has the distance d in an exponent.

    If so, 1 / `expr` is computed by `rcp_any`, a reciprocal that also accepts infinities.
    """
    return any(power.exp.has(d) for power in expr.atoms(sympy.exp, sympy.Pow))


def confirm_power(power: sympy.Pow, d: sympy.Symbol) -> None:
    """Check that the generated code computes a power x^y correctly for every theta and distance d.

    The code computes the power as 2^(y log2 x), unless `direct` accepts y. One of these conditions
    must hold:

    - `direct` accepts y;
    - x is always positive;
    - y is a number, and x is never negative;
    - y > 0, x depends only on d, and x is 0 only at d = 0.

    If x may be 0 at d = 0, the generated code replaces log2 0 by a finite number.

    Raises:
        NotExpressible: None of the conditions holds.
    """
    base, exponent = power.args
    near, far = base.subs(d, 0), base.subs(d, sympy.Symbol("far", positive=True))
    if exponent.is_number:
        sound = direct(exponent) or base.is_nonnegative
    elif near.is_zero:
        sound = far.is_positive and exponent.is_positive and base.free_symbols == {d}
    else:
        sound = near.is_positive and far.is_positive
    if not sound:
        raise NotExpressible(f"{power} is not safe for every theta within its bounds")


def direct(exponent: sympy.Expr) -> bool:
    """Return whether a power with this exponent is computed by products, roots or reciprocals."""
    return exponent in HALVES or (exponent.is_Integer and abs(exponent) <= 4)


def log2(arg: sympy.Expr, lowered: sympy.Expr, d: sympy.Symbol) -> sympy.Expr:
    """Return the logarithm of `lowered` to base 2, as an expression.

    If the value of `arg` at the distance d = 0 may be 0 but not negative, the logarithm of 0 is
    replaced by a finite number.

    Args:
        arg: The expression before `lower` has rewritten it.
        lowered: The same expression after `lower` has rewritten it.
    """
    near = arg.subs(d, 0)  # not guarded if it may be negative, because NaN must be visible
    guarded = near.is_nonnegative and not near.is_positive
    return (LG2_OR_FINITE if guarded else LG2)(lowered)
