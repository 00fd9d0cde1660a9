"""Check that code derived from a distance kernel's formula computes the same as the formula.

The derived code is a symbolic expression (`trace`), or Triton device functions that are generated
from the expression. The logits of the derived code, and their gradients with respect to theta (the
distance kernel's parameters), are compared with exact values. The embedding's own formula computes
the exact values in float64. The distances go up to 1e6, and some samples have theta at its bounds.

In fp32, the allowed error of the derived code is a sum of three numbers: 8 times the error of the
embedding's own formula in fp32, 4 times the change of the exact result when the last bits of theta
and the distance change, and 1e-4 of the size of the exact result. Where the embedding's formula is
not finite, every result is accepted.

Legend: R samples, N columns of theta. Results [R, 1 + N] are logits, followed by their gradients.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.positional import PositionalEmbedding

DISTANCES = (0.0, 1.0, 2.0, 3.0, 17.0, 250.0, 4099.0, 65_537.0, 999_983.0)
SCALE, LOWEST, LAST_BITS = 0.25, -1e30, 2.0**-23
UNBOUNDED = 10.0  # instead of an infinite bound, theta has a number up to this one
FP32, FP64 = (1.0, 1e-4), (1e-6, 1e-9)  # `share` and `least` in `Confirmation.worst`
Logits = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Confirmation:
    """Sample inputs of an embedding, and the exact logits and gradients for these inputs."""

    def __init__(self, pos: PositionalEmbedding):
        generator = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        def logits(theta: Tensor, s: Tensor, d: Tensor, i: Tensor) -> Tensor:
            # each row of theta at each distance, of which the diagonal is wanted
            bias, weight = pos.bias_at(theta, d, i), pos.weight_at(theta, d, i)
            x = SCALE * s * (1.0 if weight is None else weight.expand(len(d), -1).diagonal())
            return x if bias is None else x + bias.expand(len(d), -1).diagonal()

        bounds = torch.tensor([(p.low, p.high) for p in pos.parameters]).double().view(-1, 2)
        ends = UNBOUNDED * (1 - 0.5 * draw(*bounds.shape))  # unequal: |x| = |y| may be a kink
        low, high = bounds.clamp(-ends, ends).unbind(1)
        mixed = torch.where(draw(4, len(bounds)) < 0.5, low, high)
        inside = (draw(4, len(bounds)) + 0.2).clamp(low, high)
        theta = torch.cat((inside, mixed, low[None], high[None])).float().double()
        d = torch.tensor(DISTANCES, dtype=torch.float64)
        i = (d + 3 * d.flip(0) + 1000).repeat(len(theta))  # i = d may be a kink
        theta, d = theta.repeat_interleave(len(d), dim=0), d.repeat(len(theta))
        s = 4 + 4 * draw(len(d))
        # Theta [R, N], query-key products [R], distances [R] and positions [R], in float64.
        self.inputs = (theta, s, d, i)
        # Results [R, 1 + N]: a logit and its derivatives with respect to the columns of theta.
        self.exact = results_of(logits, self.inputs, torch.float64)
        # The absolute error of the results if the embedding computes them in fp32.
        self.lost = (results_of(logits, self.inputs, torch.float32) - self.exact).abs()
        # The largest change of `exact` if the last bits of theta and the distances change.
        self.noise = torch.zeros_like(self.exact)
        for _ in range(2):
            near = [x * (1 + LAST_BITS * (2 * draw(*x.shape).round() - 1)) for x in (theta, d)]
            other = results_of(logits, (near[0], s, near[1], i), torch.float64)
            self.noise = torch.maximum(self.noise, (other - self.exact).abs())

    def worst(self, got: Tensor, share: float, least: float) -> float:
        """Return the largest ratio of an actual error to the allowed error.

        Args:
            got: The logits and gradients to be checked.
            share: The number that multiplies the rounding errors of fp32 in the allowed error.
            least: The number that multiplies the size of the exact result in the allowed error.
        """
        theta, s, *_ = self.inputs
        # 1 for a logit, and 1 / max(1, |theta|) for a derivative with respect to theta.
        units = torch.cat((torch.ones_like(s)[:, None], theta.abs().clamp(min=1.0)), dim=1)
        size = torch.maximum(self.exact.abs(), 1 / units)
        allowed = share * (8 * self.lost + 4 * self.noise) + least * size
        ratio = (got.clamp(min=LOWEST) - self.exact).abs() / allowed
        return ratio.nan_to_num(torch.inf, torch.inf)[allowed.isfinite()].max().item()


def results_of(logits: Logits, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """Return logits and their gradients, computed in `dtype` and converted to float64."""
    theta, *others = (x.to(dtype) for x in inputs)
    theta = theta.detach().clone().requires_grad_()
    x = logits(theta, *others).to(dtype)
    gradient = torch.zeros_like(theta)
    if x.requires_grad:
        (gradient,) = torch.autograd.grad(x.sum(), theta)
    # [R, 1 + N]: column 0 has the logits of R samples.
    return torch.cat((x.detach()[:, None], gradient), dim=1).double().clamp(min=LOWEST)
