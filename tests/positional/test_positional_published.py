"""Test against numbers of the released code (`tests/fixtures/kernels`) and its T5 buckets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron.positional import load

RTOL = 1e-6


@pytest.fixture(scope="module")
def probes(fixtures) -> dict[str, torch.Tensor]:
    with np.load(fixtures / "kernels" / "probes.npz", allow_pickle=False) as stored:
        return {key: torch.from_numpy(stored[key]) for key in stored.files}


@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize(
    "name,published", [("kerple_log", "kerple_log"), ("kerple_power", "kerple_power_ap_")]
)
def test_kerple_bias(probes, name, published, length):
    pos = load(name)
    columns = [probes[f"{published}/float32/param/{p.name}"].flatten() for p in pos.parameters]
    d = torch.arange(length).flip(0)
    expected = probes[f"{published}/float32/L{length}"]
    got = pos.bias(torch.stack(columns, dim=1), d)
    torch.testing.assert_close(got, expected, rtol=RTOL, atol=0)


@pytest.mark.parametrize("length", [64, 512])
def test_alibi_bias(probes, length):
    pos = load("alibi")
    theta = pos.initial_theta(4)
    assert torch.equal(theta[:, 0], probes["alibi/float32/slopes"])
    expected = probes[f"alibi/float32/L{length}"]
    got = pos.bias(theta, torch.arange(length).flip(0))
    torch.testing.assert_close(got, expected, rtol=RTOL, atol=0)


def test_sinusoidal_table(probes):
    expected = probes["sinusoidal/float32/L600_half_precision_arg"]
    got = load("sinusoidal").table(torch.arange(0, 600, 10), expected.shape[1])
    torch.testing.assert_close(got, expected, rtol=RTOL, atol=1e-6)


def test_rotary_cosines_and_sines(probes):
    """Rotating (1, 0) in each plane of two dimensions gives the cosine and the sine."""
    cos, sin = probes["rotary/float32/cos600"], probes["rotary/float32/sin600"]
    ones = torch.cat((torch.ones(1, 1, 600, 8), torch.zeros(1, 1, 600, 8)), dim=-1)
    turned, _ = load("rotary").rotate(ones, ones, offset=0, rotary_ndims=16, base=10000)
    turned = turned[0, 0, ::10]
    torch.testing.assert_close(turned[:, :8], cos[:, :8], rtol=RTOL, atol=1e-6)
    torch.testing.assert_close(turned[:, 8:], sin[:, :8], rtol=RTOL, atol=1e-6)


@pytest.mark.parametrize("buckets,max_distance", [(32, 128), (16, 40), (64, 1000)])
def test_rpe_buckets(buckets, max_distance):
    """Compare bucket edges with exact arithmetic: bucket m + i starts at the smallest d with
    (d / m)^(n - m) >= (max_distance / m)^i, where m = n // 2."""
    d = torch.arange(0, 3 * max_distance)
    got = load("rpe", num_buckets=buckets, max_distance=max_distance).bucket(d).tolist()
    m = buckets // 2
    for distance, bucket in enumerate(got):
        steps = buckets - m
        exact = sum(distance**steps * m**i >= max_distance**i * m**steps for i in range(1, steps))
        assert bucket == (distance if distance < m else m + exact), distance
    assert max(got) == buckets - 1


def test_rpe_scale_multiplies_the_table():
    theta = torch.randn(2, 32)
    d = torch.arange(300)
    scaled = load("rpe", scale=math.sqrt(64)).bias(theta, d)
    torch.testing.assert_close(scaled, 8 * load("rpe").bias(theta, d))
