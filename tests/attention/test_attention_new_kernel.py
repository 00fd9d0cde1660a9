"""A new kernel of distance is one file: with its torch formula come all backends and gradients."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
import torch

import megatron.positional
from megatron.attention import attend, choose
from megatron.attention.fused import functions_of
from megatron.positional import load, names

FILE = '''
"""b_h(d) = -strength log(1 + reach d^bend): the paper's 3-para-log under other names."""

import torch

from megatron.positional.base import PositionalEmbedding, ThetaParameter


class Throwaway(PositionalEmbedding):
    """strength, reach ~ U(0, 1) >= 0.01; bend ~ 2 U(0, 1) in [0.01, 2]."""

    kind = "distance"
    learnable = True
    parameters = (
        ThetaParameter("strength", low=0.01),
        ThetaParameter("reach", low=0.01),
        ThetaParameter("bend", low=0.01, high=2.0, scale=2.0),
    )

    def bias(self, theta_HN, d):
        d, strength, reach, bend = self.columns(theta_HN, d)
        return -strength * (1 + reach * d.pow(bend)).log()
'''


@pytest.fixture
def pos(tmp_path, monkeypatch):
    (tmp_path / "throwaway.py").write_text(FILE)
    folders = [*megatron.positional.__path__, str(tmp_path)]
    monkeypatch.setattr(megatron.positional, "__path__", folders)
    importlib.invalidate_caches()
    yield load("throwaway")
    sys.modules.pop("megatron.positional.throwaway", None)


def exact(q, k, v, theta, scale):
    """Attention with the same kernel in numpy, float64, one row at a time."""
    heads, length = q.shape[1:3]
    out = np.zeros(q.shape)
    for h in range(heads):
        strength, reach, bend = theta[h]
        for i in range(length):
            d = i - np.arange(i + 1.0)
            scores = scale * k[:, h, : i + 1] @ q[:, h, i, :, None]
            scores = scores[..., 0] - strength * np.log(1 + reach * d**bend)
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            out[:, h, i] = (probs[:, None] @ v[:, h, : i + 1])[:, 0]
    return out


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
