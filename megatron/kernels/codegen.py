"""Generate Triton device functions, with derivatives, from the expression of a distance kernel.

A distance kernel is a factor w or a bias b that depends on the query-key distance d. The logit of a
query q and a key k is x = scale s w(d) + b(d) with s = q . k. The function `evaluate` returns
y = x / scale = s w + b / scale, the slope dy/ds = w, and one term for each theta_k. The term is
dx/dtheta_k without the factors that depend on neither s nor d. The Triton kernels sum the terms
over scores, and `finish` multiplies the sums by these factors.

b and w may also depend on the query's position i in its document. `evaluate` gets i as the argument
`row`. A bias may also contain one layer of hidden units (see `hidden_layer`). The layer's
parameters have no terms. Instead, `evaluate` then returns (y, w, u, terms), where u is the layer's
input.

The generated code is fast for three reasons:

- Logarithms and exponentials have base 2, for which a GPU has single instructions. The constants
  ln 2 and log2 e become part of the constants that `prepare` computes.
- `prepare` computes everything that depends on neither s nor d, once per Triton program.
- d is the difference di - dj of a row vector and a column vector, so A + B d with constants A and B
  costs one subtraction per score: (A + B di) - B dj. di and dj are counted from the tile's first
  key. Therefore di and dj are small where d is small, and no digits are lost.

At d = 0, powers d^p and products d^p log d are computed as 0, as in torch's derivative of pow. The
generated source texts are stored in `linecache`, where Triton and tracebacks find them.
"""

import hashlib
import linecache
from collections.abc import Callable, Sequence
from typing import Any

import sympy

from megatron.kernels import device, lowering
from megatron.kernels.device_functions import DeviceFunctions
from megatron.kernels.hidden_layer import Layer, hidden_layer, hidden_slope

GLOBALS = vars(device) | {"hidden_layer": hidden_layer, "hidden_slope": hidden_slope}
CALLS = {name: name + "({})" for name in lowering.NAMES} | {
    "sin": "sine({})", "cos": "cosine({})", "Abs": "tl.abs({})", "larger": "tl.maximum({}, {})",
    "select": "tl.where({} < {}, {}, {})",
    "sign": "tl.where({0} < 0.0, -1.0, tl.where(0.0 < {0}, 1.0, 0.0))",
}  # fmt: skip
SCALAR_CALLS = (
    CALLS | dict.fromkeys(("lg2", "lg2_or_finite"), "tl.log2({})") | {"ex2": "tl.exp2({})"}
)


def device_functions(
    name: str,
    formula: lowering.Formula,
    bounds: Sequence[tuple[float, float]] = (),
    rewrite: Callable[[Any], Any] = sympy.sympify,
) -> DeviceFunctions:
    """Generate Triton functions for logits with a positional embedding, and for their gradients.

    Args:
        name: A name for the generated source text.
        formula: The expressions of the bias b that is added to the scores, and of the factor w that
            multiplies the scores.
        bounds: The smallest and the largest value of each parameter, in the order of theta.
        rewrite: A function that rewrites a derivative, for example into a form that does not
            overflow.

    Raises:
        NotExpressible: The generated code cannot compute b or w.
    """
    s, scale = sympy.Symbol("s", real=True), sympy.Symbol("scale", positive=True)
    distance, i, theta = formula.distance, formula.position, formula.theta
    b = sympy.S.Zero if formula.bias is None else formula.bias
    w = sympy.S.One if formula.weight is None else formula.weight
    known = dict(zip(theta, bounds, strict=False))
    for power in (b + s * w).atoms(sympy.Pow):
        lowering.confirm_power(power, distance, known)
    found = lowering.layers(b, theta)
    layer = Layer(len(theta), found[1:]) if found else None
    writer = Writer(s, distance, theta, scale, i, layer)
    inner = [writer.tile(lowering.lower(found[0], distance, known))] if found else []
    y = writer.tile(lowering.lower(s * w + b / scale, distance, known))
    slope = writer.tile(lowering.lower(w, distance, known))
    factors, terms = [], []
    terms_of = list(range(len(theta))) if layer is None else layer.others
    for column in (theta[n] for n in terms_of):
        derivative = lowering.lower(rewrite(sympy.diff(scale * s * w + b, column)), distance, known)
        factor, term = derivative.as_independent(s, distance, i, as_Add=False)
        factors.append(writer.constant(factor))
        terms.append(writer.tile(term))
    source = writer.source([y, slope, *inner], terms, factors, terms_of)
    return DeviceFunctions(
        **compiled(name, source), num_theta=len(terms), weighted=formula.weight is not None,
        source=source, layer=layer, reads_position=b.has(i) or w.has(i),
    )  # fmt: skip


class Writer:
    """Writes Triton source text that evaluates sympy expressions."""

    def __init__(
        self, s: sympy.Symbol, d: sympy.Symbol, theta: tuple, scale: sympy.Symbol,
        i: sympy.Symbol, layer: Layer | None,
    ):  # fmt: skip
        self.s, self.d, self.i, self.scale, self.layer = s, d, i, scale, layer
        self.scalars = {column: f"t{n}" for n, column in enumerate(theta)} | {scale: "scale"}
        self.constants: dict[sympy.Expr, str] = {}
        # The code of each constant, which `prepare` computes once for a head from theta and
        # scale.
        self.prepared: list[str] = []
        self.names: dict[sympy.Expr, str] = {s: "s", i: "row"}
        # The statements of `evaluate`, which computes all other numbers for a tile of scores.
        self.lines: list[str] = []

    def constant(self, expr: sympy.Expr) -> str:
        """Return source text for a constant: a number such as `0.5`, or an entry such as `c[2]`.

        c is the tuple of all constants that `prepare` computes.
        """
        if expr.is_number:
            return repr(float(expr)) if expr.is_finite else f"float('{float(expr)}')"
        if expr not in self.constants:
            self.prepared.append(self.scalar(expr))
            self.constants[expr] = f"c[{len(self.prepared) - 1}]"
        return self.constants[expr]

    def scalar(self, expr: Any) -> str:
        """Return source text that computes a constant exactly."""
        if expr.is_number:
            return self.constant(expr)
        if expr in self.scalars:
            return self.scalars[expr]
        args = [self.scalar(arg) for arg in expr.args]
        if expr.is_Add:
            return f"({' + '.join(args)})"
        if expr.is_Mul:
            return f"({' * '.join(args)})"
        if expr.is_Pow:
            return power(expr.exp, args[0], "(1.0 / {})")
        # `evaluate` calls fast approximate functions instead.
        return self.call(expr, SCALAR_CALLS).format(*args)

    def tile(self, expr: sympy.Expr) -> str:
        """Generate statements that compute an expression, and return the name of the result."""
        if not expr.has(self.s, self.d, self.i):
            return self.constant(expr)
        if expr not in self.names:
            text = self.text(expr)
            self.names[expr] = f"x{len(self.lines)}"
            self.lines.append(f"x{len(self.lines)} = {text}")
        return self.names[expr]

    def text(self, expr: Any) -> str:
        """Return source text that computes an expression."""
        slopes, others = [], []
        for arg in sympy.Add.make_args(expr):
            factor, rest = arg.as_independent(self.s, self.d, self.i, as_Add=False)
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
            # `rcp` takes numbers in pairs, and a row alone may be an odd one.
            reciprocal = "rcp({})" if expr.has(self.s, self.d) else "rcp_any({})"
            return power(expr.exp, self.tile(expr.base), reciprocal)
        if self.layer is not None and type(expr).__name__ in ("hidden_layer", "hidden_slope"):
            sizes = f"{self.layer.first}, {self.layer.width}"
            return f"{type(expr).__name__}({self.tile(expr.args[0])}, {self.row()}, {sizes})"
        return self.call(expr, CALLS).format(*(self.tile(arg) for arg in expr.args))

    def row(self) -> str:
        """Return source text for a pointer to the row of theta with the parameters of one head."""
        if "theta" not in self.prepared:
            self.prepared.append("theta")
        return f"c[{self.prepared.index('theta')}]"

    def affine(self, slope: Any, offset: Any) -> str:
        """Return source text that computes offset + slope * d for the query-key distance d."""
        # d is di - dj. Here di - dj is computed first, so that a small offset keeps its digits.
        if abs(slope) == 1 and not sympy.S(offset).is_number:
            return f"({self.constant(offset)} {'+' if slope == 1 else '-'} (di - dj))"
        k = "" if slope == 1 else f"{self.constant(slope)} * "
        start = "" if offset == 0 else f"{self.constant(offset)} + "
        return f"(({start}{k}di) - {k}dj)"

    def product(self, factor: sympy.Expr, rest: sympy.Expr) -> str:
        """Return source text that computes factor * rest."""
        # `factor` is a constant, and `rest` is not.
        if rest == 1:
            return self.constant(factor)
        if factor != 1:
            return f"{self.constant(factor)} * {self.tile(rest)}"
        *front, last = sympy.Mul.make_args(rest)  # other statements may share `front`
        return f"{self.tile(sympy.Mul(*front))} * {self.tile(last)}" if front else self.tile(last)

    def call(self, expr: sympy.Expr, calls: dict[str, str]) -> str:
        name = type(expr).__name__
        if name not in calls:
            raise lowering.NotExpressible(f"{name} has no counterpart in the generated kernels")
        return calls[name]

    def source(
        self, results: list[str], terms: list[str], factors: list[str], columns: list[int]
    ) -> str:
        """Return the source text of the generated Triton functions.

        Args:
            results: The code of the results of `evaluate` that precede the terms.
            terms: The code of the terms that `evaluate` returns, one for each gradient.
            factors: The code of the numbers by which `finish` multiplies the sums of the terms.
            columns: The column of theta to which each term belongs.
        """
        count, first = len(terms), len(results)
        loads = [f"t{n} = tl.load(theta + {n})" for n in columns]
        zeros = "tl.zeros([M, W], dtype=tl.float32)"
        pairs = [(x, n) for x in ("ds", "p") for n in range(count)]
        sums = [
            f"add_columns(acc[{m}], {x} * e[{n + first}], dtype)" for m, (x, n) in enumerate(pairs)
        ]
        rows = [f"acc[{n}] - excess[:, None] * acc[{count + n}]" for n in range(count)]
        # `finish` multiplies each sum by its factor, to get the gradient of the term's column.
        ends = [f"tl.sum({row}) * {factor}" for row, factor in zip(rows, factors, strict=True)]
        return "\n".join(
            [
                *function("prepare(theta, width, scale)", loads, self.prepared or ["scale"]),
                *function("evaluate(s, di, dj, d, c, row)", self.lines, [*results, *terms]),
                *function("zeros(M: tl.constexpr, W: tl.constexpr)", [], [zeros] * (2 * count)),
                *function("add(acc, ds, p, e, dtype: tl.constexpr)", [], sums),
                *function("finish(acc, excess, c)", [], ends),
            ]
        )


def power(exponent: sympy.Expr, base: str, reciprocal: str) -> str:
    """Return source text that computes a power.

    Args:
        exponent: A nonzero integer, 1/2 or -1/2.
        base: Source text of the base.
        reciprocal: Source text of 1 / x, with {} in the place of x.
    """
    if exponent in lowering.HALVES:
        return f"tl.sqrt({base})" if exponent > 0 else f"tl.rsqrt({base})"
    text = "(" + " * ".join([base] * abs(int(exponent))) + ")"
    return text if exponent > 0 else reciprocal.format(text)


def function(head: str, lines: list[str], results: list[str]) -> list[str]:
    body = [f"    {line}" for line in lines]
    values = ", ".join(results or ["0.0"])
    return ["@triton.jit", f"def {head}:", *body, f"    return ({values},)", "", ""]


def compiled(name: str, source: str) -> dict[str, Any]:
    """Execute source text, and return a dict of the Triton functions that it defines."""
    # Triton's caches recognise the same `name` and `source` by this path.
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    path = f"<distance kernel {name} {digest}>"
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    scope = GLOBALS | {"__name__": f"{__name__}.{name}"}
    exec(compile(source, path, "exec"), scope)
    return {key: scope[key] for key in ("prepare", "evaluate", "zeros", "add", "finish")}
