"""Define the implementations of attention that the GPU benchmark compares.

Each variant is a function (q, k, v, theta) -> output:

- `fused NAME`: this project's Triton kernels with the distance kernel NAME;
- `fused kerple_log, group 4`: the same with 4 query heads for each key head;
- `fused kerple_log, one key head`: the same with one key head for all query heads;
- `flex [H]`: FlexAttention that evaluates kerple_log's formula for each score;
- `flex table`: FlexAttention that looks up kerple_log's values in a table [H, T];
- `sdpa flash`, `sdpa cudnn`: torch's causal attention without a distance kernel;
- `sdpa efficient, mask`: torch's memory-efficient attention with kerple_log as a mask;
- `published`: the released code's operations (baddbmm, the [H, T, T] distance kernel, add, mask,
  softmax, bmm), each with its result in memory. Dropout, which would cost more, is left out.

Legend: B batch, H heads, T positions, E head size, N columns of theta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.attention import attend, flex
from megatron.positional import PositionalEmbedding, load

FUSED = ("kerple_log", "kerple_power", "none", "rpe")
LOG = load("kerple_log")
MOST_HEADS = 1 << 16
"""More heads than any attention has. In a group of so many heads, all share one key head."""


@dataclass(frozen=True)
class Variant:
    """A way to compute attention.

    Attributes:
        function: (q, k, v, theta or None) -> output [B, H, T, E].
        pos: The positional embedding whose distance kernel the function uses.
        group: The number of query heads that share a key head, if there are so many.
    """

    name: str
    function: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    pos: PositionalEmbedding
    group: int = 1

    @property
    def is_flex(self) -> bool:
        return self.name.startswith("flex")


def published(q: Tensor, k: Tensor, v: Tensor, theta_HN: Tensor) -> Tensor:
    """Compute attention as the released code does in every layer; q, k, v are [B, H, T, E]."""
    batch, heads, length, size = q.shape
    flat = batch * heads, length, size
    scores = torch.empty(batch * heads, length, length, dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(
        scores, q.reshape(flat), k.reshape(flat).mT, beta=0.0, alpha=size**-0.5
    ).view(batch, heads, length, length)
    distance, future = published_constants(length, q.dtype, q.device)
    p, a = (column[:, None, None] for column in theta_HN.to(q.dtype).unbind(1))
    scores = scores + -p * torch.log(1 + a * distance)
    probs = torch.softmax(scores.masked_fill(future, -10000.0), dim=-1)
    return torch.bmm(probs.view(-1, length, length), v.reshape(flat)).view(q.shape)


@lru_cache(maxsize=2)
def published_constants(
    length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the distances and the mask, which the released code computes only once."""
    position = torch.arange(length, device=device, dtype=torch.int32)
    difference = position[:, None] - position
    return difference.clamp(min=0).to(dtype), difference < 0


def with_mask(q: Tensor, k: Tensor, v: Tensor, theta_HN: Tensor) -> Tensor:
    distance, future = published_constants(q.shape[2], torch.float32, q.device)
    bias_HTS = LOG.bias(theta_HN, distance).to(q.dtype)
    mask = bias_HTS.masked_fill(future, -torch.inf).expand(q.shape[0], -1, -1, -1)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, mask)


def plain_sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, theta_HN: Tensor | None) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return function


def ours(backend: str, pos: PositionalEmbedding) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, theta_HN: Tensor | None) -> Tensor:
        return attend(q, k, v, pos, theta_HN, scale=q.shape[-1] ** -0.5, backend=backend)

    return function


def flex_table(q: Tensor, k: Tensor, v: Tensor, theta_HN: Tensor) -> Tensor:
    """Compute attention by FlexAttention, with the bias looked up in a table made for this call."""
    length = q.shape[2]
    if not torch.is_grad_enabled():
        q, k, v, theta_HN = (x.detach() for x in (q, k, v, theta_HN))
    score_mod = flex.tabulated(LOG, theta_HN, length, 0)
    mask = flex.causal_mask(length, length, 0, q.device)
    function = flex.function_for(q.device.type)
    size = q.shape[-1]
    tables = flex.kernel_options(load("rpe"), size)  # of an embedding that always uses tables
    options = {"scale": size**-0.5, "kernel_options": tables}
    return function(q, k, v, score_mod=score_mod, block_mask=mask, **options)


@lru_cache(maxsize=1)
def variants() -> dict[str, Variant]:
    """Return name -> variant. Repeated calls return the same objects, which torch compiles once."""
    none = load("none")
    found = [Variant(f"fused {pos.name}", ours("fused", pos), pos) for pos in map(load, FUSED)]
    found += [
        Variant("fused kerple_log, group 4", ours("fused", LOG), LOG, 4),
        Variant("fused kerple_log, one key head", ours("fused", LOG), LOG, MOST_HEADS),
        Variant("flex [H]", ours("flex", LOG), LOG),
        Variant("flex table", flex_table, LOG),
        Variant("sdpa flash", plain_sdpa(SDPBackend.FLASH_ATTENTION), none),
        Variant("sdpa cudnn", plain_sdpa(SDPBackend.CUDNN_ATTENTION), none),
        Variant("sdpa efficient, mask", with_mask, LOG),
        Variant("published", published, LOG),
    ]
    return {variant.name: variant for variant in found}


@dataclass
class Inputs:
    """The inputs q, k and v, the output's gradient, and theta for each embedding that has one."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    thetas: dict[str, Tensor]

    def of(self, variant: Variant) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        key_heads = max(1, self.q.shape[1] // variant.group)
        k, v = (x if variant.group == 1 else x[:, :key_heads] for x in (self.k, self.v))
        return self.q, k, v, self.thetas.get(variant.pos.name)

    def forward(self, variant: Variant) -> Tensor:
        with torch.no_grad():
            return variant.function(*self.of(variant))

    def both(self, variant: Variant) -> list[Tensor]:
        """Return [output, gradients of q, k, v and theta]."""
        inputs = self.of(variant)
        out = variant.function(*inputs)
        wanted = [x for x in inputs if x is not None]
        return [out.detach(), *torch.autograd.grad(out, wanted, self.grad.to(out.dtype))]

    def in_float64(self) -> Inputs:
        q, k, v = (x.detach().double().requires_grad_() for x in (self.q, self.k, self.v))
        thetas = {name: x.detach().double().requires_grad_() for name, x in self.thetas.items()}
        return Inputs(q, k, v, self.grad.double(), thetas)


def make_inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> Inputs:
    """Draw q, k, v and the output's gradient from N(0, 1); theta has its initial values."""
    generator = torch.Generator(device).manual_seed(1234)
    options = {"generator": generator, "device": device, "dtype": dtype}
    q, k, v, grad = (torch.randn(shape, **options) for _ in range(4))
    thetas = {}
    for pos in map(load, FUSED):
        if pos.kind == "distance":
            theta = pos.initial_theta(shape[1], torch.Generator().manual_seed(1234))
            thetas[pos.name] = theta.to(device).requires_grad_()
    return Inputs(*(x.requires_grad_() for x in (q, k, v)), grad, thetas)
