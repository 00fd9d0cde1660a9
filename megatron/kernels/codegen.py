"""Generate Triton device functions, with derivatives, from the expression of a distance kernel.

A distance kernel is a factor w or a bias b that depends only on the query-key distance d. The logit
of a query q and a key k is x = scale s w(d) + b(d) with s = q . k. The function `evaluate` returns
y = x / scale = s w + b / scale, the slope dy/ds = w, and one term for each theta_k. The term is
dx/dtheta_k without the constant factors, that is, those without s and d. The Triton kernels sum the
terms over scores, and `finish` multiplies the sums by the constant factors.

The generated code is fast for three reasons:

- Logarithms and exponentials have base 2, for which a GPU has single instructions. The constants
  ln 2 and log2 e become part of the constants that `prepare` computes.
- `prepare` computes everything that depends on neither s nor d, once per Triton program.
- d is the difference di - dj of a row vector and a column vector, so A + B d with constants A and
  B costs one subtraction per score: (A + B di) - B dj. As di and dj are small, no digits are lost.

At d = 0, powers d^p and products d^p log d are computed as 0, as in torch's derivative of pow. The
generated source texts are stored in `linecache`, where Triton and tracebacks find them.
"""

from __future__ import annotations

import hashlib
import linecache
import math
from dataclasses import dataclass, field
from typing import Any

import sympy
import triton
import triton.language as tl

from megatron.kernels.device import ex2, lg2, lg2_or_finite, rcp, rcp_any

LN2, LOG2E = sympy.Float(math.log(2.0)), sympy.Float(1.0 / math.log(2.0))
NAMES = ("lg2", "lg2_or_finite", "ex2", "rcp_any")
LG2, LG2_OR_FINITE, EX2, RCP_ANY = (sympy.Function(name) for name in NAMES)
HALVES = (sympy.Rational(1, 2), sympy.Rational(-1, 2))
GLOBALS = {"triton": triton, "tl": tl, "rcp": rcp, "rcp_any": rcp_any}
GLOBALS |= {"lg2": lg2, "lg2_or_finite": lg2_or_finite, "ex2": ex2}
CALLS = {name: name for name in NAMES}
SCALAR_CALLS = {"lg2": "tl.log2", "lg2_or_finite": "tl.log2", "ex2": "tl.exp2"}
for _name in ("sin", "cos"):
    CALLS[_name] = SCALAR_CALLS[_name] = f"tl.{_name}"


class NotExpressible(ValueError):
    """The generated code cannot express a function, or a power would be wrong for some theta.

    The error message names the function or the power.
    """


@dataclass(frozen=True)
class DeviceFunctions:
    """The device functions of a distance kernel. The module docstring explains the symbols.

    Attributes:
        prepare: Maps (row of theta, its length, scale) to c, the constants of a head.
        evaluate: Maps (s, di, dj, d, c) to (y, w, one term per column of theta), for a tile.
        zeros, add, finish: Create, update and sum up theta's gradients, one number per query row.
        num_theta: The number of columns of theta that have a gradient.
        weighted: Whether there is a factor w.
        tabulated: Whether "theta" is a table over distances (see `tabulated`).
        biased: Whether the table contains b.
        source: The generated source text.
    """

    prepare: Any
    evaluate: Any
    zeros: Any
    add: Any
    finish: Any
    num_theta: int
    weighted: bool
    tabulated: bool = False
    biased: bool = True
    source: str = field(default="", repr=False)

    @property
    def heavy(self) -> bool:
        """Whether the Triton kernels need more registers than for a bias with two parameters."""
        return self.weighted or self.tabulated or self.num_theta > 2


def device_functions(
    name: str,
    bias: sympy.Expr | None,
    weight: sympy.Expr | None,
    distance: sympy.Symbol,
    theta: tuple[sympy.Symbol, ...],
) -> DeviceFunctions:
    """Generate the device functions for a bias (None means 0) and a factor (None means 1).

    Raises:
        NotExpressible: The bias or the factor cannot be expressed in the generated code.
    """
    s, scale = sympy.Symbol("s", real=True), sympy.Symbol("scale", positive=True)
    b = sympy.S.Zero if bias is None else bias
    w = sympy.S.One if weight is None else weight
    for power in (b + s * w).atoms(sympy.Pow):
        confirm_power(power, distance)
    writer = Writer(s, distance, theta, scale)
    y = writer.tile(lower(s * w + b / scale, distance))
    slope = writer.tile(lower(w, distance))
    factors, terms = [], []
    for column in theta:
        derivative = lower(sympy.diff(scale * s * w + b, column), distance)
        factor, term = derivative.as_independent(s, distance, as_Add=False)
        factors.append(writer.constant(factor))
        terms.append(writer.tile(term))
    source = writer.source(y, slope, terms, factors)
    return DeviceFunctions(
        **compiled(name, source),
        num_theta=len(theta),
        weighted=weight is not None,
        source=source,
    )


def lower(expr: Any, d: sympy.Symbol) -> sympy.Expr:
    """Rewrite log, exp and general powers with the functions `lg2` (log2 x) and `ex2` (2^x)."""
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


def exponential(expr: sympy.Expr, d: sympy.Symbol) -> bool:
    """Return whether d is in an exponent, so that `rcp` may fail for very large or small values."""
    return any(power.exp.has(d) for power in expr.atoms(sympy.exp, sympy.Pow))


def confirm_power(power: sympy.Pow, d: sympy.Symbol) -> None:
    """Check that a power x^y may be computed as 2^(y log2 x) for every theta and distance d.

    This is safe if x is always positive, or if y is a number and x never negative. It is also safe
    if y > 0 and x, a function of d alone, is 0 only at d = 0: log2 0 then becomes a finite number.

    Raises:
        NotExpressible: The power may not be computed in this way.
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
    """Return whether a power with this exponent is generated as products, roots or reciprocals."""
    return exponent in HALVES or (exponent.is_Integer and abs(exponent) <= 4)


def log2(arg: sympy.Expr, lowered: sympy.Expr, d: sympy.Symbol) -> sympy.Expr:
    near = arg.subs(d, 0)  # not guarded if it may be negative, because NaN must be visible
    guarded = near.is_nonnegative and not near.is_positive
    return (LG2_OR_FINITE if guarded else LG2)(lowered)


class Writer:
    """Collects the statements of `prepare` (on scalars) and of `evaluate` (on tiles)."""

    def __init__(self, s: sympy.Symbol, d: sympy.Symbol, theta: tuple, scale: sympy.Symbol):
        self.s, self.d, self.scale = s, d, scale
        self.scalars = {column: f"t{n}" for n, column in enumerate(theta)} | {scale: "scale"}
        self.constants: dict[sympy.Expr, str] = {}
        self.prepared: list[str] = []
        self.names: dict[sympy.Expr, str] = {s: "s"}
        self.lines: list[str] = []

    def constant(self, expr: sympy.Expr) -> str:
        """Return the code of an expression without s and d: a literal or a result of `prepare`."""
        if expr.is_number:
            return repr(float(expr))
        if expr not in self.constants:
            self.prepared.append(self.scalar(expr))
            self.constants[expr] = f"c[{len(self.prepared) - 1}]"
        return self.constants[expr]

    def scalar(self, expr: Any) -> str:
        """Return code for a scalar. It calls exact functions, not the fast approximate ones."""
        if expr.is_number:
            return repr(float(expr))
        if expr in self.scalars:
            return self.scalars[expr]
        args = [self.scalar(arg) for arg in expr.args]
        if expr.is_Add:
            return f"({' + '.join(args)})"
        if expr.is_Mul:
            return f"({' * '.join(args)})"
        if expr.is_Pow:
            return power(expr.exp, args[0], "(1.0 / {})")
        return f"{self.call(expr, SCALAR_CALLS)}({', '.join(args)})"

    def tile(self, expr: sympy.Expr) -> str:
        """Emit statements that compute an expression for a tile, and return the result's name."""
        if not expr.has(self.s, self.d):
            return self.constant(expr)
        if expr not in self.names:
            text = self.text(expr)
            self.names[expr] = f"x{len(self.lines)}"
            self.lines.append(f"x{len(self.lines)} = {text}")
        return self.names[expr]

    def text(self, expr: Any) -> str:
        """Return the right-hand side of the statement that computes an expression for a tile."""
        slopes, others = [], []
        for arg in sympy.Add.make_args(expr):
            factor, rest = arg.as_independent(self.s, self.d, as_Add=False)
            (slopes.append(factor) if rest == self.d else others.append((factor, rest)))
        if slopes:
            offset = sum(factor for factor, rest in others if rest == 1)
            others = [(factor, rest) for factor, rest in others if rest != 1]
            text = self.affine(sum(slopes), offset)
            return " + ".join([*(self.tile(f * r) for f, r in others), text])
        if expr.is_Add:
            return " + ".join(self.product(factor, rest) for factor, rest in others)
        if expr.is_Mul:
            return self.product(*others[0])
        if expr.is_Pow and expr.exp < -1:  # a product of 1/x, since x^4 may leave rcp's range
            return power(-expr.exp, self.tile(1 / expr.base), "")
        if expr.is_Pow:
            return power(expr.exp, self.tile(expr.base), "rcp({})")
        return f"{self.call(expr, CALLS)}({', '.join(self.tile(arg) for arg in expr.args)})"

    def affine(self, slope: Any, offset: Any) -> str:
        """Return the code of offset + slope d with d = di - dj: (offset + slope di) - slope dj."""
        k = "" if slope == 1 else f"{self.constant(slope)} * "
        start = "" if offset == 0 else f"{self.constant(offset)} + "
        return f"(({start}{k}di) - {k}dj)"

    def product(self, factor: sympy.Expr, rest: sympy.Expr) -> str:
        """Return the code of `factor`, a constant, times `rest`, a product of other expressions."""
        if rest == 1:
            return self.constant(factor)
        if factor != 1:
            return f"{self.constant(factor)} * {self.tile(rest)}"
        *front, last = sympy.Mul.make_args(rest)  # other statements may share `front`
        return f"{self.tile(sympy.Mul(*front))} * {self.tile(last)}" if front else self.tile(last)

    def call(self, expr: sympy.Expr, calls: dict[str, str]) -> str:
        name = type(expr).__name__
        if name not in calls:
            raise NotExpressible(f"{name} has no counterpart in the generated kernels")
        return calls[name]

    def source(self, y: str, slope: str, terms: list[str], factors: list[str]) -> str:
        """Return the source of the generated `prepare`, `evaluate`, `zeros`, `add` and `finish`."""
        count = len(terms)
        loads = [f"t{n} = tl.load(theta + {n})" for n in range(count)]
        zeros = "tl.zeros([M], dtype=tl.float32)"
        sums = [f"acc[{n}] + tl.sum(ds * e[{n + 2}], axis=1)" for n in range(count)]
        ends = [f"tl.sum(acc[{n}], axis=0) * {factor}" for n, factor in enumerate(factors)]
        return "\n".join(
            [
                *function("prepare(theta, width, scale)", loads, self.prepared or ["scale"]),
                *function("evaluate(s, di, dj, d, c)", self.lines, [y, slope, *terms]),
                *function("zeros(M: tl.constexpr)", [], [zeros] * count),
                *function("add(acc, ds, e)", [], sums),
                *function("finish(acc, c)", [], ends),
            ]
        )


def power(exponent: sympy.Expr, base: str, reciprocal: str) -> str:
    """Return the code of `base` to the power `exponent`, for which `direct(exponent)` is true."""
    if exponent in HALVES:
        return f"tl.sqrt({base})" if exponent > 0 else f"tl.rsqrt({base})"
    text = "(" + " * ".join([base] * abs(int(exponent))) + ")"
    return text if exponent > 0 else reciprocal.format(text)


def function(head: str, lines: list[str], results: list[str]) -> list[str]:
    body = [f"    {line}" for line in lines]
    values = ", ".join(results or ["0.0"])
    return ["@triton.jit", f"def {head}:", *body, f"    return ({values},)", "", ""]


def compiled(name: str, source: str) -> dict[str, Any]:
    """Compile `source` to Triton functions. Equal texts get equal paths, for Triton's caches."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    path = f"<distance kernel {name} {digest}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    scope = GLOBALS | {"__name__": f"{__name__}.{name}"}
    exec(compile(source, path, "exec"), scope)
    return {key: scope[key] for key in ("prepare", "evaluate", "zeros", "add", "finish")}
