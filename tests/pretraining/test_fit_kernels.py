"""Test that distance kernels are fitted to what old positions do to the logits."""

from __future__ import annotations

import numpy as np
import torch

from megatron.attention import choose
from megatron.model import GPT, BlockShape, GPTShape, Plan
from megatron.model.changed_positions import ChangedPositions
from megatron.positional import PerLayer, load
from megatron.pretraining.fit_kernels import fit_added

LENGTH, HEADS, SIZE, LAYERS = 32, 4, 8, 2
PLANTED = torch.tensor([[1.5, 0.3], [0.4, 0.05], [0.02, 2.0], [3.0, 0.8]])


def model_of(pos, theta=None) -> GPT:
    shape = GPTShape(LAYERS, 32, BlockShape(HEADS * SIZE, HEADS), LENGTH, init_std=0.3)
    attend = choose("eager", pos, device_type="cpu", dtype=torch.float64, training=False)
    model = GPT(Plan(shape, pos, attend, seed=5)).double().eval()
    if theta is not None:
        model.theta.data.copy_(theta)
    return model


def tokens(count=3):
    return torch.randint(32, (count, LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def fitted(old, new, theta=None):
    """Return the fitted columns of `new`, [H, columns], in the order of theta."""
    change = ChangedPositions(old, new, LAYERS, LENGTH)
    found = fit_added(model_of(old, theta), change, tokens())
    return torch.stack([found[n] for n in sorted(found)], dim=1)


def test_a_planted_kernel_is_found_in_another_form():
    planted = torch.cat((PLANTED, torch.ones(HEADS, 1)), dim=1)  # kerple_log3 with r = 1
    found = fitted(load("kerple_log3"), load("kerple_log"), planted)
    torch.testing.assert_close(found, PLANTED.double(), rtol=1e-4, atol=1e-5)


def test_what_is_dropped_beside_kept_positions_is_found():
    planted = torch.cat((PLANTED, torch.ones(HEADS, 1)), dim=1)
    found = fitted(load("rotary + kerple_log3"), load("kerple_log + rotary"), planted)
    torch.testing.assert_close(found, PLANTED.double(), rtol=1e-4, atol=1e-5)


def test_the_fit_of_dropped_rotary_angles_is_the_best_that_numpy_finds():
    """A table of one bias for each distance can hold any target, up to its constant.

    The target is computed pair by pair, from the queries and keys of each layer.
    """
    rpe = load("rpe", num_buckets=2 * LENGTH, max_distance=LENGTH + 1)
    found = fitted(load("rotary"), rpe).numpy()[:, :LENGTH]
    model, wanted = model_of(load("rotary")), np.zeros((LAYERS, HEADS, LENGTH))
    inputs: list[torch.Tensor] = []
    for block in model.layers:
        block.attention.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        model(tokens())
        for layer, (block, x) in enumerate(zip(model.layers, inputs, strict=True)):
            q, k, _ = block.attention.queries_keys_values(x)
            turned = load("rotary").rotate(q, k, rotary_ndims=SIZE)
            gap = ((turned[0] @ turned[1].mT - q @ k.mT) / SIZE**0.5).numpy()
            for d in range(LENGTH):
                pairs = np.diagonal(gap, -d, axis1=2, axis2=3)
                wanted[layer, :, d] = pairs.mean(axis=(0, 2))
    y = wanted.mean(0)
    centre = np.arange(LENGTH, 0, -1)
    for array in (found, y):
        array -= np.average(array, axis=1, weights=centre)[:, None]
    np.testing.assert_allclose(found, y, atol=1e-6)


def test_each_layer_is_fitted_alone_if_it_has_its_own_theta():
    planted = torch.cat((PLANTED, torch.ones(HEADS, 1)), dim=1)
    both = torch.cat((planted, planted.flip(0)), dim=1)
    old, new = (PerLayer([load(f"kerple_{x}")] * LAYERS, own_theta=True) for x in ("log3", "log"))
    wanted = torch.cat((PLANTED, PLANTED.flip(0)), dim=1).double()
    torch.testing.assert_close(fitted(old, new, both), wanted, rtol=1e-4, atol=1e-5)


def test_bounds_hold():
    found = fitted(load("rotary"), load("kerple_log"))
    assert found.min() >= 0.01 - 1e-9 and torch.isfinite(found).all()
