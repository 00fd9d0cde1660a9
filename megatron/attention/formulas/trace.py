"""Read a distance kernel's torch formula as a symbolic expression.

A distance kernel is a bias or a factor that depends on the query-key distance. `read` runs the
embedding's methods `bias_at` and `weight_at` on a few numbers under torch's tracer, and translates
the recorded operations to sympy. The result has one symbol for the distance and one for each column
of theta. From this expression `megatron.kernels.codegen` generates Triton device functions with
their derivatives, and `flex` makes FlexAttention's score_mod.

Some biases also depend on the query's position i. With a temperature, the factor also depends on i.
In both cases, the expression has a symbol for i. A layer of hidden units (as in FIRE) becomes a
single sympy function.

A formula has a symbolic expression only if it treats each distance and each head separately. For
example, T5's bias has no expression, because it is a lookup in a table. Before an expression is
used, it is evaluated at other numbers and compared with the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron.attention.formulas.confirm import FP32, FP64, SCALE, Confirmation, results_of
from megatron.attention.formulas.torch_to_sympy import Reader, Unreadable
from megatron.positional import PositionalEmbedding

if TYPE_CHECKING:
    import sympy

    from megatron.kernels.device_functions import DeviceFunctions
    from megatron.kernels.lowering import Formula

PROBES = (0.0, 1.0, 3.0, 17.0, 250.0, 4099.0)


@lru_cache(maxsize=64)
def read(pos: PositionalEmbedding) -> Formula:
    """Return the formula of a positional embedding as symbolic expressions.

    Raises:
        Unreadable: The formula cannot be written as expressions, for example because it uses a
            table.
    """
    import sympy

    from megatron.kernels.lowering import Formula

    distance, position = (sympy.Symbol(name, nonnegative=True) for name in ("d", "i"))
    if not (pos.has("distance") or pos.has("temperature")):
        return Formula(None, None, distance, (), position)
    theta = tuple(
        sympy.Symbol(
            f"theta_{n}", real=True, positive=low > 0 or None, nonnegative=low >= 0 or None
        )
        for n, low in enumerate(parameter.low for parameter in pos.parameters)
    )
    reader = Reader(distance, theta, position)
    # Not in the caller's modes: the default device of a plan is meta, which has no values.
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        bias, weight = (reader.expression(part) for part in parts_of(pos))
        # The factor includes the embedding's temperature, if there is one.
        formula = Formula(bias, weight, distance, theta, position)
        confirm(pos, formula)
    return formula


def parts_of(pos: PositionalEmbedding) -> tuple[Callable[..., Tensor | None], ...]:
    """Return the two parts of an embedding's formula: torch functions for its bias and weight."""
    # Both take theta, the distances and the positions. Both may return None.
    return pos.bias_at, pos.weight_at


def confirm(pos: PositionalEmbedding, formula: Formula) -> None:
    """Check that symbolic expressions compute the same as the embedding itself.

    Raises:
        Unreadable: The results differ, or the expressions cannot be computed.
    """
    import sympy

    # Other inputs than those with which the formula was read.
    bias, weight = (x or default for x, default in ((formula.bias, 0), (formula.weight, 1)))
    shown = " and ".join(str(x) for x in (formula.bias, formula.weight) if x is not None)
    samples, s = Confirmation(pos), sympy.Symbol("s")
    try:
        function = torch_function(SCALE * s * weight + bias, (s, *formula.arguments))
        got, got32 = (
            results_of(lambda x, *others: function(*others, *x.unbind(1)), samples.inputs, dtype)
            for dtype in (torch.float64, torch.float32)
        )
    except (AttributeError, TypeError, RuntimeError) as error:  # such as a complex number
        raise Unreadable(f"{shown} cannot be evaluated: {error}") from error
    if samples.worst(got, *FP64) > 1:
        raise Unreadable(f"the expression read, {shown}, is not what it computes")
    if samples.worst(got32, *FP32) > 1:
        raise Unreadable(f"{shown} loses digits in fp32")


def confirms_code(pos: PositionalEmbedding, functions: DeviceFunctions) -> bool:
    """Return whether generated Triton functions compute the same as the embedding itself."""
    from megatron.kernels.simulate import simulate

    # Not checked.
    if functions.layer is not None or not functions.num_theta:
        return True
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"):
        samples = Confirmation(pos)
        return samples.worst(simulate(functions, samples.inputs, SCALE), *FP32) <= 1


@lru_cache(maxsize=128)  # `torch.compile` would compile every new function object again
def torch_function(expression: sympy.Expr, arguments: tuple[sympy.Symbol, ...]) -> Callable:
    """Return a torch function that computes a sympy expression.

    Args:
        expression: The sympy expression.
        arguments: The symbols that become the function's arguments, which are tensors.
    """
    names = [symbol.name for symbol in arguments]
    scope = {"torch": torch, "inf": math.inf, "larger": larger}
    # without sympy, so that `torch.compile` can trace the function
    return eval(f"lambda {', '.join(names)}: {torch_text(expression)}", scope)


def larger(x: Any, y: Any, t: float) -> Tensor:
    """Return max(x, y). Where x = y, x gets the share t of the gradient, and y gets 1 - t."""
    first, second = torch.where(x < y, y, x), torch.where(y < x, x, y)
    return first if t == 1 else second if t == 0 else (first + second) / 2


def torch_text(expression: Any) -> str:
    """Return Python code that computes a sympy expression by calls of torch."""
    if expression.is_number:
        return f"({float(expression)!r})"
    if expression.is_Symbol:
        return expression.name
    args, name = [torch_text(arg) for arg in expression.args], type(expression).__name__
    if expression.is_Add:
        return f"({' + '.join(args)})"
    if expression.is_Mul:  # with divisions, because the derivative of x^-1 underflows for large x
        below = [x for x in expression.args if x.is_Pow and x.exp == -1]
        above = [text for text, x in zip(args, expression.args, strict=True) if x not in below]
        divided = "".join(f" / {torch_text(1 / x)}" for x in below)
        return f"({' * '.join(above or ['1.0'])}{divided})"
    if expression.is_Pow and expression.base.is_number:
        return f"torch.exp({math.log(expression.base)!r} * {args[1]})"
    if expression.is_Pow:
        return f"({args[0]} ** {args[1]})"
    if name == "select":
        tensor = args[1 if expression.args[0].is_number else 0]  # so that numbers get its dtype
        return f"torch.where({args[0]} < {args[1]}, {args[2]} + 0 * {tensor}, {args[3]})"
    if name == "larger":
        return f"larger({', '.join(args)})"
    if name == "hidden_layer":
        units = zip(*expression.columns, strict=True)
        units = (f"{v} * torch.relu({w} * u + {b})" for w, b, v in units)
        return f"(lambda u: {' + '.join(units)})({args[0]})"
    return f"torch.{name.lower()}({args[0]})"
