"""Make inputs for the tests of kernels, and compare fused attention with float64 autograd.

The kernels run on a GPU if there is one, and otherwise in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.attention import attend
from megatron.positional import PositionalEmbedding, load, within_bounds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, SIZE = (333, 64) if DEVICE == "cuda" else (40, 16)
"""The smallest numbers of positions and head size that give several tiles and a partial one."""
TOLERANCE = {torch.float32: 5e-6, torch.float16: 5e-3}
"""dtype -> tolerance in Triton's interpreter, which computes bf16 wrongly."""

if DEVICE == "cuda":
    # 16 bits: p, ds and the output (whence delta) are rounded once each, half an epsilon at most,
    # and go into sums. fp32: lg2 and ex2 are exact to two epsilons, in logits of up to some tens.
    # Products in fp32 are IEEE's on either side; under TF32 (10 bits) no such figure would hold.
    SHARES = {torch.float32: 300, torch.float16: 5, torch.bfloat16: 5}
    TOLERANCE = {dtype: share * torch.finfo(dtype).eps for dtype, share in SHARES.items()}


@dataclass
class Case:
    """The inputs of an attention call, all of which need gradients.

    `inputs` is [q, k, v], followed by theta if the embedding is a distance kernel.
    """

    pos: PositionalEmbedding
    inputs: list[torch.Tensor]
    grad: torch.Tensor

    def run(self, backend: str, dtype: torch.dtype | None = None, **options) -> list[torch.Tensor]:
        """Return [output, gradient of each input], computed in `dtype`."""
        inputs = [
            x.detach().to(dtype or x.dtype).requires_grad_(x.requires_grad) for x in self.inputs
        ]
        options = {"scale": 0.35} | options
        out = attend(*inputs[:3], self.pos, *inputs[3:], backend=backend, **options)
        wanted = [x for x, mine in zip(inputs, self.inputs, strict=True) if mine.requires_grad]
        return [out, *torch.autograd.grad(out, wanted, self.grad.to(out.dtype))]


def make(
    pos: PositionalEmbedding | str,
    batch: int = 2,
    heads: int = 2,
    queries: int = 37,
    size: int = 16,
    *,
    key_heads: int | None = None,
    keys: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    pos = load(pos) if isinstance(pos, str) else pos
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, length: int) -> torch.Tensor:
        x = torch.randn(batch, heads, length, size, generator=generator)
        return x.to(DEVICE, dtype).requires_grad_()

    key_heads, keys = key_heads or heads, keys or queries
    inputs = [draw(heads, queries), draw(key_heads, keys), draw(key_heads, keys)]
    if pos.kind == "distance":
        theta = pos.initial_theta(heads, generator)
        theta = theta + 0.05 * torch.rand(heads, 1, generator=generator)
        if pos.name == "bam":  # 2 sinh(theta_mu) near 0 has few digits in fp32, in eager, too
            theta[:, 2] += 0.3
        theta = within_bounds(theta, pos.parameters)
        inputs.append(theta.to(DEVICE).requires_grad_(pos.learnable))
    return Case(pos, inputs, draw(heads, queries).detach())


def assert_close(got: list[torch.Tensor], exact: list[torch.Tensor], tolerance: float) -> None:
    """Check that each largest error is below `tolerance` times the largest true value (or 1)."""
    for n, (x, y) in enumerate(zip(got, exact, strict=True)):
        assert x.shape == y.shape
        error = (x.double() - y.double()).abs().max().item()
        limit = tolerance * max(1.0, y.abs().max().item())
        assert error <= limit, f"result {n} (out, dq, dk, dv, dtheta): {error:.1e} > {limit:.1e}"


def check(case: Case, tolerance: float | None = None, **options) -> None:
    """Compare the backend `fused` with `eager` in float64."""
    dtype = case.inputs[0].dtype
    got = case.run("fused", **options)
    assert [x.dtype for x in got[:4]] == [dtype] * 4
    exact = case.run("eager", torch.float64, **options)
    assert_close(got, exact, tolerance or TOLERANCE[dtype])
