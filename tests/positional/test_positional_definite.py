"""Test that biases are conditionally positive definite, and factors positive definite."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.positional import load
from tests.positional.formulas64 import ENTRIES
from tests.positional.test_contract import DISTANCE, draw_theta


def one_head(name: str, seed: int, highest: float = 2.0) -> torch.Tensor:
    """Draw one head's theta [1, columns], with values of at most `highest` if they are drawn."""
    if ENTRIES[name].initial is not None:
        return torch.from_numpy(ENTRIES[name].initial(8))[seed][None]
    return draw_theta(name, seed, heads=4)[seed % 4][None].clamp(max=highest)


def gram(name: str, part: str, seed: int, highest: float = 2.0) -> np.ndarray:
    """Return one head's kernel matrix on random real positions, with theta at most `highest`."""
    positions = torch.from_numpy(np.random.default_rng(seed).uniform(0, 60, 40))
    distances = (positions[:, None] - positions).abs()
    return getattr(load(name), part)(one_head(name, seed, highest), distances)[0].numpy()


def smallest_eigenvalue(matrix: np.ndarray) -> float:
    return np.linalg.eigvalsh(matrix)[0] / np.abs(matrix).max()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", [name for name in DISTANCE if ENTRIES[name].cpd])
def test_bias_is_conditionally_positive_definite(name, seed):
    """For theta within its bounds, c^T K c >= 0 for all c with sum 0."""
    kernel = gram(name, "bias", seed)
    centre = np.eye(len(kernel)) - 1.0 / len(kernel)
    assert smallest_eigenvalue(centre @ kernel @ centre) > -1e-10


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", [name for name in DISTANCE if ENTRIES[name].cpd])
def test_bias_plus_a_constant_is_positive_definite(name, seed):
    """Exponents are at most 1.5 here, because -d^2 would need an infinitely large constant. For a
    bounded kernel the paper gives the constant, where the matrix is too singular to find it."""
    kernel = gram(name, "bias", seed, highest=1.5)
    assert smallest_eigenvalue(kernel) < -0.1  # without a constant it is not
    if ENTRIES[name].limit is not None:
        constant = ENTRIES[name].limit(one_head(name, seed, highest=1.5)[0].tolist())
        assert smallest_eigenvalue(kernel + constant) > -1e-10
        return
    constant = -2.0 / np.linalg.inv(kernel).sum()  # twice the smallest that does it
    assert constant > 0 and smallest_eigenvalue(kernel + constant) > -1e-10
    assert smallest_eigenvalue(kernel + 0.4 * constant) < 0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", [name for name in DISTANCE if ENTRIES[name].weight])
def test_weight_is_positive_definite(name, seed):
    assert smallest_eigenvalue(gram(name, "weight", seed)) > -1e-10


def test_rpe_is_rightly_exempt_from_definiteness():
    """A learned table need not be conditionally positive definite: this one rises with distance."""
    theta = torch.linspace(0, 5, 32, dtype=torch.float64)[None]
    positions = torch.arange(40)
    kernel = load("rpe").bias(theta, (positions[:, None] - positions).abs())[0].numpy()
    centre = np.eye(len(kernel)) - 1.0 / len(kernel)
    assert smallest_eigenvalue(centre @ kernel @ centre) < -0.1
