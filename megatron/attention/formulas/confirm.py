"""Check that what was read from a distance kernel's formula computes the same as the formula.

A reading is a symbolic expression (`trace`), or the device functions generated from it. It is
compared with the embedding in float64, for values and for gradients with respect to theta (the
distance kernel's parameters), at distances up to 1e6 and with theta at its bounds.

The fp32 error of a reading may be 8 times that of the embedding's own formula in fp32, plus the
change of the true result when all inputs change in their last bits, plus 1e-4 of its size. Where
the embedding's formula is not finite in fp32, anything is accepted.

Legend: R samples, N columns of theta. Results [R, 1 + N] are logits, followed by their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.attention.formulas.torch_to_sympy import Unreadable
from megatron.positional import PositionalEmbedding

DISTANCES = (0.0, 1.0, 2.0, 3.0, 17.0, 250.0, 4099.0, 65_537.0, 999_983.0)
UNBOUNDED = 10.0
"""A column of theta without a bound goes to a number between half of this and this, in size."""
SCALE = 0.25
LOWEST = -1e30
LAST_BITS = 2.0**-23
FP32, FP64 = (1.0, 1e-4), (1e-6, 1e-9)
"""Arguments `share` and `least` of `worst`."""
Logits = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of theta [R, N], the product s, the distance d and the position i (each [R])."""


class Confirmation:
    """The samples at which an embedding is compared with what was read from its formula.

    Attributes:
        inputs: Theta, the query-key products s, the distances d and the positions i, in float64.
        exact: The embedding's results in float64.
        noise: How much `exact` changes when the last bits of theta and d change.
        lost: The error of the embedding's own results in fp32.
    """

    def __init__(self, pos: PositionalEmbedding):
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        bounds = torch.tensor([(p.low, p.high) for p in pos.parameters]).double().view(-1, 2)
        stand_in = UNBOUNDED * (1 - 0.5 * draw(*bounds.shape))  # unequal, as |x| = |y| may be a kink
        low, high = bounds.clamp(-stand_in, stand_in).unbind(1)
        inside = (draw(4, len(bounds)) + 0.2).clamp(low, high)
        mixed = torch.where(draw(4, len(bounds)) < 0.5, low, high)
        theta = torch.cat((inside, mixed, low[None], high[None])).float().double()
        d = torch.tensor(DISTANCES, dtype=torch.float64)
        i = (d + 3 * d.flip(0)).repeat(len(theta))
        theta, d = theta.repeat_interleave(len(d), dim=0), d.repeat(len(theta))
        self.inputs = (theta, 4 + 4 * draw(len(d)), d, i)

        def results(x: Tensor = theta, at: Tensor = d, dtype: Any = torch.float64) -> Tensor:
            inputs = (x, self.inputs[1], at, i)
            return results_of(lambda *given: logits_of(pos, *given), inputs, dtype)

        self.exact = results()
        signs = [draw(2, *x.shape).round() * 2 - 1 for x in (theta, d)]
        near = [
            results(theta * (1 + LAST_BITS * a), d * (1 + LAST_BITS * b))
            for a, b in zip(*signs, strict=True)
        ]
        self.noise = torch.stack([(x - self.exact).abs() for x in near]).amax(0)
        self.lost = (results(dtype=torch.float32) - self.exact).abs()

    def worst(self, got: Tensor, share: float, least: float) -> float:
        """Return the largest error of results, divided by what rounding explains. 1 is right.

        Args:
            share: The accepted share of the errors that rounding to fp32 explains.
            least: The accepted share of the size of a result, or of 1 if that is larger.
        """
        sizes = torch.cat((torch.ones_like(self.inputs[1])[:, None], self.inputs[0]), dim=1)
        size = torch.maximum(self.exact.abs(), 1 / sizes.abs().clamp(min=1.0))
        allowed = share * (8 * self.lost + 4 * self.noise) + least * size
        ratio = (got.clamp(min=LOWEST) - self.exact).abs() / allowed
        return ratio.nan_to_num(torch.inf, torch.inf)[allowed.isfinite()].max().item()

    def expression(self, text: Any, logits: Logits) -> None:
        """Check a function of torch that evaluates the symbolic expression `text`.

        Raises:
            Unreadable: It differs from the embedding, or it cannot be evaluated.
        """
        try:
            got, got32 = (results_of(logits, self.inputs, x) for x in (torch.float64, torch.float32))
        except (AttributeError, TypeError, RuntimeError) as error:  # such as a complex number
            raise Unreadable(f"{text} cannot be evaluated: {error}") from error
        if self.worst(got, *FP64) > 1:
            raise Unreadable(f"the expression read, {text}, is not what it computes")
        if self.worst(got32, *FP32) > 1:
            raise Unreadable(f"{text} loses digits in fp32")


def logits_of(pos: PositionalEmbedding, theta: Tensor, s: Tensor, d: Tensor, i: Tensor) -> Tensor:
    """Return R logits of the embedding, from R rows of theta."""
    shape = (len(s), len(s))  # each row of theta at each distance, of which the diagonal is wanted
    bias, weight = pos.bias_at(theta, d, i), pos.weight_at(theta, d, i)
    x = SCALE * s if weight is None else SCALE * s * weight.expand(shape).diagonal()
    return x if bias is None else x + bias.expand(shape).diagonal()


def results_of(logits: Logits, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Return the logits that a function computes in `dtype`, and their gradients, as float64."""
    theta, *others = (x.to(dtype) for x in inputs)
    theta = theta.detach().clone().requires_grad_()
    x = logits(theta, *others).to(dtype)
    gradient = torch.zeros_like(theta)
    if x.requires_grad and theta.numel():
        (gradient,) = torch.autograd.grad(x.sum(), theta)
    return torch.cat((x.detach()[:, None], gradient), dim=1).double().clamp(min=LOWEST)
