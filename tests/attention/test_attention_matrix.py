"""Test that each combination of embedding, backend, dtype, device and training works or is refused.

The error of a refused combination must name the backends that work. This file states independently
which combinations should work. Those that work on this machine are also run, and compared with
eager attention in float64.
"""

from __future__ import annotations

import re

import pytest
import torch

from megatron.attention import AttentionError, Call, choose
from megatron.attention.choice import BACKENDS
from megatron.kernels import device
from megatron.positional import load
from tests.helpers.embeddings import ALIKE, PLAIN

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
HERE = "cuda" if torch.cuda.is_available() else "cpu"
WEIGHTED = ("kerple_power_mul", "kerple_power_add_mul", "gaussian_mul")
NO_KERNEL = ("rotary", "sinusoidal", "learned", "none")
T, E = 18, 8


def serves(backend: str, name: str, dtype: torch.dtype, on: str, training: bool) -> bool:
    if backend == "fused":
        return on == "cuda" and dtype != torch.float64
    if backend == "sdpa":
        return name in NO_KERNEL or (name not in WEIGHTED and not training)
    if backend == "flex":
        return not (on == "cpu" and training) and not (on == "cuda" and dtype == torch.float64)
    return True


@pytest.fixture
def compiled(monkeypatch):
    """Make the choice of a backend believe that Triton kernels are compiled, not interpreted."""
    monkeypatch.setattr(device, "INTERPRETED", False)


@pytest.mark.parametrize("on", ["cpu", "cuda"])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("name", PLAIN)
def test_what_is_chosen_and_what_is_refused(name, backend, on, compiled):
    pos = load(name)
    for dtype in DTYPES:
        for training in (True, False):
            use = {"device_type": on, "dtype": dtype, "training": training}
            if backend == "auto":
                chosen = choose("auto", pos, **use)
                best = on == "cuda" and dtype != torch.float64
                assert chosen.name == ("fused" if best else "blocked")
                for part in ("auto", name, str(dtype), on):
                    assert part in chosen.reason
            elif serves(backend, name, dtype, on, training):
                assert choose(backend, pos, **use).name == backend
            else:
                with pytest.raises(AttentionError) as caught:
                    choose(backend, pos, **use)
                named = re.search(rf"attention_backend {backend} .* use (.*)$", str(caught.value))
                alternatives = named[1].split(", ")
                expected = {b for b in BACKENDS if serves(b, name, dtype, on, training)}
                assert set(alternatives) == {"auto"} | expected


@pytest.mark.parametrize("on", ["cpu", "cuda"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("term", ["masked", "decays", "sink"])
def test_which_terms_are_served(term, backend, on, compiled):
    pos = load("sink" if term == "sink" else "none")
    options = {} if term == "sink" else {term: True}
    for dtype in DTYPES:
        for training in (True, False):
            use = {"device_type": on, "dtype": dtype, "training": training, **options}
            served = serves(backend, "none", dtype, on, training)
            if backend == "sdpa":  # a trained mask of all scores
                served &= term == "masked" or not training
            if served:
                assert choose(backend, pos, **use).name == backend
            else:
                with pytest.raises(AttentionError):
                    choose(backend, pos, **use)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [name for name in PLAIN if name not in ALIKE])
def test_what_is_served_is_right(name, backend):
    """In Triton's interpreter, `fused` also serves CPUs, in fp32 and fp16 but not in bf16."""
    pos = load(name)
    for dtype, tolerance in DTYPES.items():
        for training in (True, False):
            if backend == "fused":
                served = dtype in (torch.float32, torch.float16)
                served |= dtype == torch.bfloat16 and HERE == "cuda"
            else:
                served = serves(backend, name, dtype, HERE, training)
            use = {"device_type": HERE, "dtype": dtype, "training": training, "head_size": E}
            if not served:
                with pytest.raises(AttentionError):
                    choose(backend, pos, **use)
                continue
            q, k, v = (torch.randn(2, 2, T, E, device=HERE).to(dtype) for _ in range(3))
            theta = []
            if pos.kind == "distance":
                at_least_fp32 = torch.promote_types(dtype, torch.float32)
                theta = [(pos.initial_theta(2) + 0.05).to(HERE, at_least_fp32)]
            inputs = [q, k, v, *theta]
            results = []
            for function, to in (
                (choose(backend, pos, **use), lambda x: x.detach().clone()),
                (
                    choose("eager", pos, device_type=HERE, dtype=torch.float64),
                    lambda x: x.detach().double(),
                ),
            ):
                mine = [to(x).requires_grad_(training) for x in inputs]
                out = function(Call(*mine[:3], pos, *mine[3:], scale=0.35))
                grads = torch.autograd.grad(out.square().sum(), mine) if training else []
                results.append([out, *grads])
            for got, exact in zip(*results, strict=True):
                limit = tolerance * max(1.0, exact.abs().max().item())
                assert (got.double() - exact).abs().max() <= limit, (dtype, training)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["kerple_log", "alibi", "rpe", "none"])
def test_offsets_later_keys_and_shared_key_heads(name, backend):
    """Two query heads share a key head. Three queries begin at position 7. There are 14 keys, the
    last four of which are the unused part of a cache."""
    pos = load(name)
    q = torch.randn(2, 4, 3, E, device=HERE)
    k, v = torch.randn(2, 2, 2, 14, E, device=HERE).unbind()
    k[:, :, 10:] = v[:, :, 10:] = torch.nan
    theta = [(pos.initial_theta(4) + 0.05).to(HERE)] if pos.kind == "distance" else []
    use = {"device_type": HERE, "training": False}
    for queries in (q, q[:, :, :1]):
        chosen = choose(backend, pos, dtype=torch.float32, **use)
        with torch.no_grad():
            got = chosen(Call(queries, k, v, pos, *theta, scale=0.35, query_offset=7))
        repeated = [x.double().repeat_interleave(2, dim=1) for x in (k, v)]
        eager = choose("eager", pos, dtype=torch.float64, **use)
        exact = [x.double() for x in theta]
        call = Call(queries.double(), *repeated, pos, *exact, scale=0.35, query_offset=7)
        out = eager(call)
        assert (got - out).abs().max() < 1e-5


def test_a_choice_holds_for_the_use_it_was_made_for():
    """A call with gradients or dropout fails if the request for the backend excluded them."""
    pos, (q, k, v) = load("kerple_log"), torch.randn(3, 1, 2, T, E)
    theta = pos.initial_theta(2).requires_grad_()
    chosen = choose("sdpa", pos, device_type="cpu", dtype=torch.float32, training=False)
    with torch.no_grad():
        chosen(Call(q, k, v, pos, theta, scale=0.3))
    with pytest.raises(AttentionError, match="memory quadratic in the length to train"):
        chosen(Call(q, k, v, pos, theta, scale=0.3))
    flex = choose("flex", pos, device_type="cpu", dtype=torch.float32, training=False)
    with torch.no_grad(), pytest.raises(AttentionError, match="attention_dropout must be 0"):
        flex(Call(q, k, v, pos, theta, scale=0.3, dropout_p=0.1))
    with pytest.raises(AttentionError, match="no backward pass on a CPU"):
        flex(Call(q, k, v, pos, theta, scale=0.3))
    fused = choose("fused", pos, device_type="cpu", dtype=torch.float32)  # in the interpreter
    with pytest.raises(AttentionError, match="does not serve torch.float64"):
        fused(Call(q.double(), k.double(), v.double(), pos, theta.double(), scale=0.3))
    with pytest.raises(AttentionError, match="head sizes up to 256, not 300"):
        fused(Call(*torch.randn(3, 1, 2, T, 300), pos, theta, scale=0.3))


@pytest.mark.parametrize(
    "use,message",
    [
        ({"device_type": "cpu"}, "needs a CUDA GPU .* use auto, eager, blocked$"),
        ({"dtype": torch.float64}, "does not serve torch.float64. .* use auto, eager, blocked$"),
        ({"head_size": 320}, "serves head sizes up to 256, not 320. .* use auto, eager, blocked"),
    ],
)
def test_why_fused_is_refused(use, message, compiled):
    use = {"device_type": "cuda", "dtype": torch.float32} | use
    with pytest.raises(AttentionError, match=message):
        choose("fused", load("kerple_log"), **use)


def test_the_interpreter_is_never_used_in_bf16(monkeypatch):
    monkeypatch.setattr(device, "INTERPRETED", True)
    with pytest.raises(AttentionError, match="wrong in bf16 in Triton's interpreter"):
        choose("fused", load("kerple_log"), device_type="cpu", dtype=torch.bfloat16)
    chosen = choose("fused", load("kerple_log"), device_type="cpu", dtype=torch.float32)
    assert "interpreter" in chosen.reason


def test_auto_says_why_it_passes_fused_over(compiled, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    use = {"device_type": "cuda", "dtype": torch.bfloat16}
    chosen = choose("auto", load("kerple_log"), **use)
    assert chosen.name == "blocked" and "needs Triton, which is not installed" in chosen.reason
    with pytest.raises(AttentionError, match="needs Triton"):
        choose("fused", load("kerple_log"), **use)
