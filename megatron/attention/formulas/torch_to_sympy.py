"""Translate a torch function to a sympy expression, as described in `trace`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import sympy

HEADS, DISTANCES, FURTHER = 3, (0.0, 1.0, 2.0, 7.0, 100.0), (3.0, 700.0, 40.0, 1.0, 2000.0)
"""A formula is traced with HEADS heads, for d in DISTANCES, at query positions d + FURTHER."""


class Unreadable(ValueError):
    """A torch function cannot be translated to a sympy expression. The message has the reason."""


class Reader:
    """Translates a torch function of distances, positions and parameters to sympy."""

    def __init__(
        self, distance: sympy.Symbol, theta: tuple[sympy.Symbol, ...], position: sympy.Symbol
    ):
        self.distance, self.theta, self.position = distance, theta, position

    def expression(self, function: Callable[..., Tensor | None]) -> Any:
        """Return the result of a torch function as a sympy expression.

        If the torch function returns None, the result is None.

        Raises:
            Unreadable: The result cannot be written as a sympy expression.
        """
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.node import map_arg

        theta_HN = torch.linspace(0.3, 0.9, HEADS * len(self.theta), dtype=torch.float64)
        theta_HN = theta_HN.view(HEADS, len(self.theta))
        d = torch.tensor(DISTANCES, dtype=torch.float64)
        i = d + torch.tensor(FURTHER, dtype=torch.float64)
        with torch.no_grad():
            example = function(theta_HN, d, i)
            if example is None:
                return None
            if example.shape != (HEADS, len(DISTANCES)):
                raise Unreadable(f"a formula's value is [heads, distances], not {example.shape}")
            try:
                graph = make_fx(lambda *inputs: function(*inputs))(theta_HN, d, i)
            except Exception as error:  # a formula may do anything, and torch has no common error
                raise Unreadable(f"it cannot be traced: {error}") from error
        # The value of a node of the graph is a sympy expression (the same for all heads and
        # distances), a tensor of indices of theta's columns, several of these, or a plain value.
        values: dict[Any, Any] = {}
        columns = torch.arange(len(self.theta)).repeat(HEADS, 1)
        inputs = iter((columns, self.distance, self.position))
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
        """Convert a value to a sympy expression."""
        import sympy

        if isinstance(value, int | float):
            return exact(value)
        if isinstance(value, Tensor) and len(found := self.columns(value)) == 1:
            return found[0]
        if isinstance(value, sympy.Expr):
            return value
        raise Unreadable("it uses theta as a whole, not column by column")

    def columns(self, indices: Tensor) -> list[Any]:
        """Return the symbols of some columns of theta.

        Args:
            indices: The indices of the columns. A repeated index counts once.
        """
        return [self.theta[int(n)] for n in indices.unique()]

    def operation(self, target: Any, args: list, kwargs: dict) -> Any:
        """Translate one torch operation, and return its result."""
        name = getattr(target, "__name__", str(target)).split(".")[0]
        name = name.removeprefix("logical_").removeprefix("bitwise_")
        if isinstance(args[0], Tensor | tuple | list) and name in SAME | PARTS:
            try:
                return target(*args, **kwargs)
            except (RuntimeError, IndexError) as error:  # theta has other strides, or fewer rows
                raise Unreadable(f"the operation {name} of theta's columns: {error}") from error
        if name in SAME:
            return args[0]
        table = elementary()
        if name == "hidden_layer" and all(isinstance(each, Tensor) for each in args[1:]):
            units = (x for each in args[1:] for x in self.columns(each))
            return table[name](self.scalar(args[0]), *units)
        if name not in table:
            raise Unreadable(f"the operation {name} has no place in an expression of d and theta")
        if name in ("add", "sub") and kwargs.get("alpha", 1) != 1:
            args[1] = self.scalar(args[1]) * exact(kwargs["alpha"])
        elif set(kwargs) - {"alpha", "dtype", "layout", "device", "pin_memory"}:
            raise Unreadable(f"the operation {name} has options {sorted(kwargs)}")
        return table[name](*(None if arg is None else self.scalar(arg) for arg in args))


PARTS = {"getitem", "unbind", "select", "split", "split_with_sizes", "slice"}
SAME = {"_to_copy", "view", "_unsafe_view", "reshape", "unsqueeze", "expand", "clone", "detach",
        "alias", "contiguous", "to", "lift_fresh_copy"}  # fmt: skip


def exact(value: float) -> Any:
    """Convert a number to a sympy number. A multiple of 1/2 becomes an exact fraction."""
    import sympy

    doubled = 2.0 * float(value)
    # Then sympy recognises exponents such as 2 and 1/2.
    if doubled.is_integer() and abs(doubled) < 1 << 20:
        return sympy.Rational(int(doubled), 2)
    return sympy.Float(value)


@lru_cache(maxsize=1)
def elementary() -> dict[str, Callable[..., Any]]:
    """Return a dict from the name of each supported torch operation to a sympy function."""
    import sympy as sp

    from megatron.kernels.lowering import hidden_layer, larger, select

    half = sp.Rational(1, 2)

    def smaller(x: Any, y: Any, t: Any = half) -> Any:
        negative: Any = larger(-x, -y, t)
        return -negative

    def clamp(x: Any, low: Any = None, high: Any = None) -> Any:
        x = x if low is None else larger(x, low, 1)
        return x if high is None else smaller(x, high, 1)

    def equal(x: Any, y: Any) -> Any:
        return select(x, y, 0, select(y, x, 0, 1))

    return {
        "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "rsub": lambda x, y: y - x,
        "mul": lambda x, y: x * y, "div": lambda x, y: x / y, "neg": lambda x: -x,
        "pow": lambda x, y: x**y, "reciprocal": lambda x: 1 / x, "square": lambda x: x**2,
        "sqrt": sp.sqrt, "rsqrt": lambda x: 1 / sp.sqrt(x), "exp": sp.exp,
        "exp2": lambda x: sp.Integer(2) ** x, "expm1": lambda x: sp.exp(x) - 1, "log": sp.log,
        "log1p": lambda x: sp.log(1 + x), "log2": lambda x: sp.log(x) / sp.log(2),
        "sin": sp.sin, "cos": sp.cos, "zeros_like": lambda x: sp.S.Zero,
        "ones_like": lambda x: sp.S.One, "full_like": lambda x, value: value,
        "scalar_tensor": lambda value: value, "hidden_layer": hidden_layer,
        "relu": lambda x: larger(x, 0, 0), "abs": sp.Abs, "clamp": clamp, "clamp_min": clamp,
        "clamp_max": lambda x, high: clamp(x, None, high),
        "maximum": lambda x, y: larger(x, y, half), "minimum": smaller,
        # truth values are the numbers 1 and 0
        "where": lambda where, x, y: select(0, where, x, y),
        "masked_fill": lambda x, where, y: select(0, where, y, x),
        "lt": lambda x, y: select(x, y, 1, 0), "gt": lambda x, y: select(y, x, 1, 0),
        "ge": lambda x, y: select(x, y, 0, 1), "le": lambda x, y: select(y, x, 0, 1),
        "eq": equal, "ne": lambda x, y: 1 - equal(x, y), "not": lambda x: 1 - x,
        "and": lambda x, y: x * y, "or": lambda x, y: x + y - x * y,
    }  # fmt: skip
