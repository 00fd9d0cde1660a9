"""Define a new distance kernel in a file of its own, and attention with it in numpy."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest

import megatron.positional
from megatron.positional import load

FILE = '''
"""b_h(d) = -strength log(1 + reach d^bend): the paper's 3-para-log under other names."""

import torch

from megatron.positional.base import PositionalEmbedding, ThetaParameter


class Throwaway(PositionalEmbedding):
    """strength, reach ~ U(0, 1) >= 0.01; bend ~ 2 U(0, 1) in [0.01, 2]."""

    kind = "distance"
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
def new_kernel(tmp_path, monkeypatch):
    (tmp_path / "throwaway.py").write_text(FILE)
    folders = [*megatron.positional.__path__, str(tmp_path)]
    monkeypatch.setattr(megatron.positional, "__path__", folders)
    importlib.invalidate_caches()
    yield load("throwaway")
    sys.modules.pop("megatron.positional.throwaway", None)


def exact(q, k, v, theta, scale):
    """Compute attention with the new kernel in numpy in float64, one query row at a time."""
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
