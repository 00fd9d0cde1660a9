"""Test the choice of a backend, and the refusal of invalid inputs."""

from __future__ import annotations

import pytest
import torch

from megatron.attention import AttentionError, Call, choose
from megatron.positional import load
from tests.helpers.embeddings import PLAIN

Q, K, V = torch.randn(3, 2, 4, 6, 8).unbind()
POS = load("kerple_log")
THETA = POS.initial_theta(4)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["auto", "eager", "blocked"])
def test_every_pair_works(name, dtype, backend):
    pos = load(name)
    chosen = choose(backend, pos, device_type="cpu", dtype=dtype)
    assert chosen.name == ("blocked" if backend == "auto" else backend)
    theta = pos.initial_theta(4) if pos.kind == "distance" else None
    qkv = [x.to(dtype) for x in (Q, K, V)]
    out = chosen(Call(*qkv, pos, theta, scale=0.3))
    eager = choose("eager", pos, device_type="cpu", dtype=torch.float64)
    exact = eager(Call(*(x.double() for x in qkv), pos, theta, scale=0.3))
    assert out.dtype == dtype and out.shape == Q.shape
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-2)


def test_auto_says_why():
    reason = choose("auto", POS, device_type="cpu", dtype=torch.bfloat16).reason
    for part in ("auto", "no quadratic buffer", "kerple_log", "torch.bfloat16", "cpu"):
        assert part in reason


@pytest.mark.parametrize(
    "backend,message",
    [
        ("block", "no attention_backend 'block'; did you mean blocked? There are: auto, eager"),
        ("", "no attention_backend ''; There are: auto, eager, blocked, "),
    ],
)
def test_what_cannot_be_had_names_alternatives(backend, message):
    with pytest.raises(AttentionError) as caught:
        choose(backend, POS, device_type="cpu", dtype=torch.float32)
    assert message in str(caught.value)


@pytest.mark.parametrize("backend", ["eager", "blocked"])
@pytest.mark.parametrize(
    "change,message",
    [
        ({"q_BHTE": Q[0]}, r"\[batch, heads, positions, head size\], and only the batch may be 0"),
        ({"v_BKSE": V[0]}, r"must be \[batch, heads, positions, head size\]"),
        ({"q_BHTE": Q[:, :, :0]}, "only the batch may be 0"),
        ({"q_BHTE": Q.long(), "k_BKSE": K.long(), "v_BKSE": V.long()}, "floating-point numbers"),
        ({"k_BKSE": K[:, :, :5]}, "k and v in heads and length"),
        ({"k_BKSE": K[:1], "v_BKSE": V[:1]}, "agree in batch"),
        ({"v_BKSE": V.double()}, "one dtype"),
        ({"query_offset": 1}, "queries at positions 1 ... 6 need their own keys, .* are 6"),
        ({"query_offset": -1}, "query_offset"),
        ({"dropout_p": 1.0}, "dropout_p must lie in"),
        ({"dropout_p": -0.1}, "dropout_p must lie in"),
        ({"theta_HN": None}, r"kerple_log needs theta \[4, 2\], got none"),
        ({"theta_HN": THETA[:2]}, r"needs theta \[4, 2\], got \[2, 2\]"),
    ],
)
def test_inputs_that_make_no_sense(backend, change, message):
    good = {"q_BHTE": Q, "k_BKSE": K, "v_BKSE": V, "pos": POS, "theta_HN": THETA, "scale": 0.3}
    chosen = choose(backend, POS, device_type="cpu", dtype=torch.float32)
    chosen(Call(**good))
    with pytest.raises(AttentionError, match=message):
        chosen(Call(**(good | change)))


@pytest.mark.parametrize("version,major,serves", [
    ("3.6.0", 9, False), ("3.7.1", 9, True), ("3.10.0", 9, True), ("3.6.0", 8, True),
])  # fmt: skip
def test_an_unsafe_triton_on_hopper_is_refused(monkeypatch, version, major, serves):
    """Before Triton 3.7.1, a fence is missing between copies and matrix products."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr("megatron.kernels.device.INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(triton, "__version__", version)
    request = {"device_type": "cuda", "dtype": torch.bfloat16, "head_size": 64}
    if serves:
        assert choose("fused", load("kerple_log"), **request).name == "fused"
    else:
        with pytest.raises(AttentionError, match="needs Triton 3.7.1 or newer on Hopper GPUs"):
            choose("fused", load("kerple_log"), **request)
