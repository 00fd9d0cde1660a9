"""A new distance kernel is one file: its torch formula suffices for all backends and gradients."""

from __future__ import annotations

import numpy as np
import torch

from megatron.attention import attend, choose
from megatron.attention.fused import functions_of
from megatron.positional import names
from tests.attention import new_kernel
from tests.attention.new_kernel import exact

pos = new_kernel.new_kernel


def test_all_backends_and_their_gradients(pos):
    assert "throwaway" in names() and not functions_of(pos)[0].tabulated
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = torch.randn(4, 2, 3, 21, 8, generator=generator).double().unbind()
    theta = pos.initial_theta(3, generator).double() + 0.1
    truth = exact(*(x.numpy() for x in (q, k, v, theta)), 0.3)
    gradients = {}
    for backend in ("eager", "blocked", "fused"):
        dtype = torch.float32 if backend == "fused" else torch.float64
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v, theta)]
        out = attend(*inputs[:3], pos, inputs[3], scale=0.3, backend=backend)
        np.testing.assert_allclose(out.detach(), truth, atol=2e-6)
        gradients[backend] = torch.autograd.grad(out, inputs, grad.to(dtype))
    for backend in ("blocked", "fused"):
        for got, expected in zip(gradients[backend], gradients["eager"], strict=True):
            assert (got - expected).abs().max() < 5e-6 * max(1.0, expected.abs().max())
    for backend in ("flex", "sdpa"):  # on a CPU: forward only
        out = attend(q, k, v, pos, theta, scale=0.3, backend=backend)
        np.testing.assert_allclose(out, truth, atol=1e-7)


def test_it_is_chosen_by_its_name(pos):
    chosen = choose("auto", pos, device_type="cpu", dtype=torch.float32)
    assert "throwaway" in chosen.reason
