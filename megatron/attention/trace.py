"""Read a distance kernel's torch formula as a symbolic expression.

A distance kernel is a bias or a factor that depends only on the query-key distance. `read` runs the
embedding's methods `bias` and `weight` on a few numbers under torch's tracer, and translates the
recorded operations to sympy. The result has one symbol for the distance and one for each column of
theta. From this expression `megatron.kernels.codegen` generates Triton device functions with their
derivatives, and `flex` makes FlexAttention's score_mod.

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

from megatron.positional import PositionalEmbedding

if TYPE_CHECKING:
    import sympy

HEADS, DISTANCES = 3, (0.0, 1.0, 2.0, 7.0, 100.0)
DTYPES = (torch.float64, torch.float32)
PROBES = (0.0, 1.0, 3.0, 17.0, 250.0, 4099.0)


class Unreadable(ValueError):
    """The formula is not a symbolic expression of the distance and the parameters theta.

    The error message names the unsupported operation.
    """


@dataclass(frozen=True)
class Formula:
    """A distance kernel as sympy expressions of the distance and the kernel's parameters theta.

    If `bias` is None, the bias is 0. If `weight` is None, the factor is 1.
    """

    bias: sympy.Expr | None
    weight: sympy.Expr | None
    distance: sympy.Symbol
    theta: tuple[sympy.Symbol, ...]


@lru_cache(maxsize=64)
def read(pos: PositionalEmbedding) -> Formula:
    """Return the embedding's formula as symbolic expressions.

    If the embedding is not a distance kernel, the returned formula has bias 0 and factor 1.

    Raises:
        Unreadable: The formula has no expression. Its values can still be tabulated.
    """
    import sympy

    distance = sympy.Symbol("d", nonnegative=True)
    if not pos.has("distance"):
        return Formula(None, None, distance, ())
    theta = tuple(
        sympy.Symbol(f"theta_{n}", **assumed(column.low)) for n, column in enumerate(pos.parameters)
    )
    reader = Reader(distance, theta)
    formula = Formula(reader.expression(pos.bias), reader.expression(pos.weight), distance, theta)
    with torch.inference_mode(False), torch.enable_grad():  # not the caller's modes
        confirm(pos, formula)
    return formula


def assumed(low: float) -> dict[str, bool]:
    """Return what sympy may assume about a kernel's parameter with the lower bound `low`."""
    if low < 0:
        return {"real": True}
    return {"positive": True} if low > 0 else {"nonnegative": True}


def confirm(pos: PositionalEmbedding, formula: Formula) -> None:
    """Check that `formula`, which was read from `pos` at a few inputs, is correct at other inputs.

    In fp64, the values and the gradient of theta (the kernel's parameters) must equal those of the
    embedding. In fp32, the rounding errors must not be much larger than those of the embedding.

    Raises:
        Unreadable: The formula and the embedding differ.
    """
    generator = torch.Generator().manual_seed(1)
    theta_HN = torch.rand(5, len(formula.theta), generator=generator, dtype=torch.float64) + 0.2
    bounds = [(column.low, column.high) for column in pos.parameters]
    theta_HN = theta_HN.clamp(*torch.tensor(bounds, dtype=torch.float64).view(-1, 2).unbind(1))
    d = torch.tensor(PROBES, dtype=torch.float64)
    for expression, function in ((formula.bias, pos.bias), (formula.weight, pos.weight)):
        if expression is None:
            continue
        try:
            read_function = torch_function(expression, (formula.distance, *formula.theta))
            exact, exact32 = (sample(function, theta_HN, d, dtype) for dtype in DTYPES)
            got, got32 = (sample(by_columns(read_function), theta_HN, d, dtype) for dtype in DTYPES)
        except (AttributeError, TypeError, RuntimeError) as error:  # Abs, or a complex number
            raise Unreadable(f"{expression} cannot be evaluated: {error}") from error
        if not all(torch.allclose(x, y, 1e-9, 1e-12) for x, y in zip(got, exact, strict=True)):
            raise Unreadable(f"the expression read, {expression}, is not what it computes")
        lost, unavoidable = ((x[0] - exact[0]).abs() for x in (got32, exact32))
        if not (lost <= 8 * unavoidable + 1e-5 * exact[0].abs().clamp(min=1.0)).all():
            raise Unreadable(f"{expression} loses digits in fp32")


def by_columns(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of (theta_HN, d) that calls `function` with d and the columns of theta."""
    return lambda theta_HN, d: function(d, *(x[:, None] for x in theta_HN.unbind(1)))


def sample(
    function: Callable[..., Tensor | None], theta_HN: Tensor, d: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Evaluate `function` in `dtype`. Return its values and a gradient, both as fp64.

    The gradient with respect to theta (the kernel's parameters) is that of a weighted sum of the
    values at the first four distances.
    """
    theta_HN, d = theta_HN.to(dtype, copy=True).requires_grad_(), d.to(dtype)
    # At large distances an exponential may overflow, also in torch's gradient.
    value, near = (
        torch.as_tensor(function(theta_HN, some), dtype=dtype).expand(len(theta_HN), len(some))
        for some in (d, d[:4])
    )
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
    return f"torch.{type(expression).__name__}({args[0]})"


class Columns(tuple):
    """Neighbouring columns of theta, as a tuple that stands for the tensor [heads, columns]."""


class Reader:
    """Translates to sympy the graph of operations that torch's tracer has recorded.

    For each node of that graph, the tensor that the node computes is replaced by a value, one of:

    - a sympy expression, which holds for all heads and distances;
    - `Columns` of theta, the distance kernel's parameters;
    - a list of expressions;
    - a plain Python value.
    """

    def __init__(self, distance: sympy.Symbol, theta: tuple[sympy.Symbol, ...]):
        self.distance, self.theta = distance, theta

    def expression(self, function: Callable[..., Tensor | None]) -> Any:
        """Return the value of the traced function as an expression, or None if that value is None.

        Raises:
            Unreadable: The value is not an expression in the distance and theta.
        """
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.node import map_arg

        theta_HN = torch.linspace(0.3, 0.9, HEADS * len(self.theta), dtype=torch.float64)
        theta_HN = theta_HN.view(HEADS, len(self.theta))
        d = torch.tensor(DISTANCES, dtype=torch.float64)
        with torch.no_grad():
            example = function(theta_HN, d)
            if example is None:
                return None
            if example.shape != (HEADS, len(DISTANCES)):
                raise Unreadable(f"a formula's value is [heads, distances], not {example.shape}")
            try:
                graph = make_fx(lambda theta, distance: function(theta, distance))(theta_HN, d)
            except Exception as error:  # a formula may do anything, and torch has no common error
                raise Unreadable(f"it cannot be traced: {error}") from error
        values: dict[Any, Any] = {}
        inputs = iter((Columns(self.theta), self.distance))
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                constant = getattr(graph, node.target)
                if constant.numel() != 1:
                    raise Unreadable(f"it holds a tensor of {constant.numel()} numbers")
                values[node] = exact(constant.item())
            elif node.op == "call_function":
                args = map_arg(node.args, values.__getitem__)
                kwargs = map_arg(node.kwargs, values.__getitem__)
                values[node] = self.operation(node.target, list(args), dict(kwargs))
            else:  # "output", the last
                (values[node],) = map_arg(node.args, values.__getitem__)
        return self.scalar(values[node])

    def scalar(self, value: Any) -> Any:
        """Convert the value of a node of the traced graph to a single sympy expression."""
        import sympy

        if isinstance(value, int | float):
            return exact(value)
        if isinstance(value, Columns) and len(value) == 1:
            return value[0]
        if isinstance(value, sympy.Expr):
            return value
        raise Unreadable("it uses theta as a whole, not column by column")

    def operation(self, target: Any, args: list, kwargs: dict) -> Any:
        """Return the value of a node that applies torch's operation `target` to other values."""
        name = getattr(target, "__name__", str(target)).split(".")[0]
        if name in SAME:
            return args[0]
        if name == "getitem" and isinstance(args[0], list):
            return args[0][args[1]]
        if isinstance(args[0], Columns):
            columns, *where = args
            if name == "unbind" and where == [1]:
                return list(columns)
            if name == "select" and where[0] == 1:
                return columns[where[1]]
            if name == "slice" and where[:1] == [1]:
                return Columns(columns[slice(*where[1:])])
            if name == "slice" and (not where or where[1] == 0 and where[2] > 1 << 31):
                return columns  # all heads
        table = elementary()
        if name not in table:
            raise Unreadable(f"the operation {name} has no place in an expression of d and theta")
        if name in ("add", "sub") and kwargs.get("alpha", 1) != 1:
            args[1] = self.scalar(args[1]) * exact(kwargs["alpha"])
        elif kwargs and set(kwargs) != {"alpha"}:
            raise Unreadable(f"the operation {name} has options {sorted(kwargs)}")
        return table[name](*(self.scalar(arg) for arg in args))


SAME = {"_to_copy", "view", "_unsafe_view", "reshape", "unsqueeze", "expand", "clone", "detach",
        "alias", "contiguous", "to", "lift_fresh_copy"}  # fmt: skip


def exact(value: float) -> Any:
    """Return `value` as a sympy number.

    Multiples of 1/2 become exact, so that sympy recognises exponents such as 2 and 1/2.
    """
    import sympy

    doubled = 2.0 * float(value)
    if doubled.is_integer() and abs(doubled) < 1 << 20:
        return sympy.Rational(int(doubled), 2)
    return sympy.Float(value)


@lru_cache(maxsize=1)
def elementary() -> dict[str, Callable[..., Any]]:
    """Return a dictionary from torch's names of operations to their sympy counterparts."""
    import sympy as sp

    return {
        "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "rsub": lambda x, y: y - x,
        "mul": lambda x, y: x * y, "div": lambda x, y: x / y, "neg": lambda x: -x,
        "pow": lambda x, y: x**y, "reciprocal": lambda x: 1 / x, "square": lambda x: x**2,
        "sqrt": sp.sqrt, "rsqrt": lambda x: 1 / sp.sqrt(x), "exp": sp.exp,
        "exp2": lambda x: sp.Integer(2) ** x, "expm1": lambda x: sp.exp(x) - 1, "log": sp.log,
        "log1p": lambda x: sp.log(1 + x), "log2": lambda x: sp.log(x) / sp.log(2),
        "sin": sp.sin, "cos": sp.cos, "zeros_like": lambda x: sp.S.Zero,
        "ones_like": lambda x: sp.S.One,
    }  # fmt: skip
