"""Thirty-five distance kernels: published ones, and hostile ones, which ask much of their backends.

Each is a torch formula of the distance d and two parameters, x and y, within their bounds. `exact`
is attention in float64 with such a formula, without any code of the backends.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from megatron.positional import PositionalEmbedding, ThetaParameter

INF = torch.inf
POSITIVE = (0.01, INF)

BIASES = {
    "ALiBi (2108.12409)": lambda d, x, y: -x * d + y,
    "logarithm (KERPLE, 2205.09921)": lambda d, x, y: -x * torch.log(1 + y * d),
    "Gaussian (KERPLE)": lambda d, x, y: x * (torch.exp(-y * d**2) - 1),
    "exponential": lambda d, x, y: x * (torch.exp(-y * d) - 1),
    "Sandwich (2212.10356)": lambda d, x, y: (
        x * sum(torch.cos(y * d * 10000 ** (-n / 4)) - 1 for n in range(4))
    ),
    "log-spaced (Swin 2, 2111.09883)": lambda d, x, y: -x * torch.log2(1 + 8 * d) / 3 - y * d,
    "mixture (MEP, 2403.17698)": lambda d, x, y: torch.log(torch.exp(-x * d) + 1 / (1 + y * d)),
    "ceiling (LM-Infinite, 2308.16137)": lambda d, x, y: -x * torch.clamp(d, max=8) - y * d / 9,
    "window (2004.05150)": lambda d, x, y: torch.where(d < 9, -x * y * d, -INF),
    "leaky (ReRoPE)": lambda d, x, y: -x * torch.minimum(d, 8 + (d - 8) * y),
    "diagonal bonus (DIET)": lambda d, x, y: torch.where(d == 0, x, -y),
    "band": lambda d, x, y: ((d > 4) & (d <= 12)) * x - (d >= 20).float() * y,
    "band of masks": lambda d, x, y: (-x * d).masked_fill((d < 3) | ~(d != 7), 0.5) * y,
    "periodic": lambda d, x, y: -x * torch.sin(y * d) ** 2,
    "damped wave": lambda d, x, y: torch.exp(-x * d / 8) * torch.cos(y * d),
    "Hill, 4th power": lambda d, x, y: -x * y * d**4 / (1 + y * d**4),
    "Hill, 8th power": lambda d, x, y: -x / (1 + y * d**8) ** 2,
    "Huber": lambda d, x, y: -x * torch.where(d < 9 * y, d**2 / 2, 9 * y * (d - 4.5 * y)),
    "kink": lambda d, x, y: -x * (d - 10 * y).abs(),
    "tie": lambda d, x, y: -torch.maximum(4 * x, d) - torch.relu(2 * y - d) + (y - d).abs() / 9,
    "steeper of two": lambda d, x, y: -torch.maximum(x * d / 8, y * torch.log(1 + d)),
    "gentler of two": lambda d, x, y: -torch.minimum(x * d, y * d**0.5) - torch.clamp(d, 2, 5) * x,
    "saturating": lambda d, x, y: -x * torch.tanh(y * d),
    "soft knee": lambda d, x, y: -x * softplus(d - 9 * y),
    "double logarithm": lambda d, x, y: -x * torch.log(1 + torch.log(1 + y * d)),
    "steep": lambda d, x, y: -1e8 * x * d**2 - y * d,
    "overflow": lambda d, x, y: -x * torch.exp(y * d / 64),
    "guarded root": lambda d, x, y: -x * torch.where(d > 4, d, y).sqrt(),
    "far apart": lambda d, x, y: -x * (d - 3) ** 2 / (1e-12 + y * d**2 + 1e12 / (1 + d)),
}
WEIGHTS = {
    "RetNet (2307.08621)": lambda d, x, y: torch.exp(-x * d / 8) * y,
    "rational quadratic": lambda d, x, y: (1 + y * d**2 / (2 * x)) ** -x,
    "Matern 5/2": lambda d, x, y: (1 + x * d + (x * d) ** 2 / 3) * torch.exp(-x * d) * y,
    "Wendland": lambda d, x, y: torch.relu(1 - y * d / 20) ** 4 * (1 + y * d / 5) * x,
    "Epanechnikov": lambda d, x, y: x * torch.clamp(1 - (y * d / 9) ** 2, min=0.1),
    "soft window": lambda d, x, y: torch.sigmoid((9 - d) * y) * x,
    "logistic": lambda d, x, y: 1 / (1 + torch.exp(x * d / 64 - y)),
}
NAMES = [*BIASES, *WEIGHTS]


class Formula(PositionalEmbedding):
    """The distance kernel of this name in BIASES or WEIGHTS, in which x and y are at least 0.01."""

    kind = "distance"
    parameters = (ThetaParameter("x", *POSITIVE), ThetaParameter("y", *POSITIVE))

    def __init__(self, what: str):
        self.what = what

    def bias(self, theta_HN, d):
        return BIASES[self.what](*self.columns(theta_HN, d)) if self.what in BIASES else None

    def weight(self, theta_HN, d):
        return WEIGHTS[self.what](*self.columns(theta_HN, d)) if self.what in WEIGHTS else None


def exact(what: str, inputs: list[Tensor], grad: Tensor, scale: float) -> list[Tensor]:
    """Return the output of attention and the gradients of q, k, v and theta, all in float64."""
    q, k, v, theta = inputs = [x.detach().double().requires_grad_() for x in inputs]
    i = torch.arange(q.shape[2], dtype=torch.float64)
    d = i[:, None] - i
    near = d.clamp(min=0)  # formulas need not be defined at negative distances
    x, y = theta[:, :, None, None].unbind(1)
    scores = scale * q @ k.transpose(-1, -2)
    scores = (
        scores + BIASES[what](near, x, y) if what in BIASES else scores * WEIGHTS[what](near, x, y)
    )
    out = scores.masked_fill(d < 0, -INF).softmax(-1) @ v
    return [out, *torch.autograd.grad(out, inputs, grad.double())]
