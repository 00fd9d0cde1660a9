"""Test the embeddings that are no distance kernel: temperature, sink and forget gate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.positional import load
from tests.positional.formulas64 import ENTRIES
from tests.positional.test_contract import DISTANCES, rebuilt


@pytest.mark.parametrize("name", [name for name, e in ENTRIES.items() if e.temperature])
def test_temperature(name):
    theta = torch.tensor([[0.3], [1.0], [-2.0]], dtype=torch.float64)
    got = load(name).temperature(theta, DISTANCES)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), rebuilt(name, "temperature", theta, DISTANCES), 1e-13)
    matrix = load(name).temperature(theta.float(), DISTANCES.view(4, -1))
    assert matrix.dtype == torch.float32 and matrix.shape == (3, 4, len(DISTANCES) // 4)


def test_the_sink_is_its_column():
    theta = torch.randn(3, 1, dtype=torch.float64)
    assert torch.equal(load("sink").sink(theta), theta[:, 0])


def test_the_forget_gate_sums_the_logarithms_of_its_gates():
    gate = torch.randn(2, 3, 50)
    decay = load("forget_gate").decay(gate)
    logs = np.log(1 / (1 + np.exp(-gate.double().numpy())))
    assert decay.dtype == torch.float64
    np.testing.assert_allclose(decay.numpy(), np.cumsum(logs, -1), rtol=1e-6)
