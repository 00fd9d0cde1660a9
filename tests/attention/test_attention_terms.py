"""Test the terms that a call may have beside the distance kernel, against sums over single numbers.

The terms are: temperature, decay, sink, documents and window.
"""

from __future__ import annotations

import math

import pytest
import torch

from megatron.attention import AttentionError, Call, attend, choose
from megatron.positional import load

B, H, T, E = 2, 2, 9, 4
STARTS = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5, 5], [0, 1, 1, 1, 1, 1, 1, 1, 8]])


def inputs(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, H, T, E, generator=generator, dtype=torch.float64) for _ in range(3)]


def decay(seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(B, H, T, generator=generator, dtype=torch.float64).cumsum(-1)


def by_hand(q, k, v, pos, theta, *, scale, starts=None, window=None, c=None, positions=None):
    """Compute the output from the formula, score by score."""
    out = torch.zeros_like(q)
    for b, h, i in ((b, h, i) for b in range(B) for h in range(H) for i in range(T)):
        logits, values = [], []
        for j in range(i + 1):
            if starts is not None and j < starts[b, i] or window is not None and i - j > window:
                continue
            y = scale * q[b, h, i] @ k[b, h, j]
            if pos.has("temperature"):
                at = i if positions is None else positions[b, i]
                if pos.tempers_bias and starts is not None:
                    at = i - starts[b, i]
                t = pos.temperature(theta, torch.as_tensor(at))[h]
                y = y * t
            d = torch.tensor([i - j])
            if pos.has("distance"):
                bias, weight = pos.bias(theta, d), pos.weight(theta, d)
                y = y if weight is None else y * weight[h, 0]
                if bias is not None:
                    y = y + bias[h, 0] * (t if pos.tempers_bias else 1)
            y = y if c is None else y + c[b, h, i] - c[b, h, j]
            logits.append(y)
            values.append(v[b, h, j])
        if pos.has("sink"):
            logits.append(pos.sink(theta)[h])
            values.append(torch.zeros(E))
        weights = torch.softmax(torch.stack(logits), dim=0)
        out[b, h, i] = sum(w * value for w, value in zip(weights, values, strict=True))
    return out


CASES = {
    "documents": ("kerple_log", {"starts_BS": STARTS}),
    "window": ("kerple_power_mul", {"window": 3}),
    "a window of one key": ("none", {"window": 0}),
    "documents and window": ("none", {"starts_BS": STARTS, "window": 2}),
    "decay": ("kerple_log", {"decay_BHS": decay()}),
    "temperature": ("log_n", {}),
    "temperature by document": ("log_n", {"positions_BT": torch.arange(T) - STARTS}),
    "tempered bias": ("log_n + kerple_log + bam + kerple_power_mul", {"window": 5}),
    "tempered bias in documents": ("log_n + bam", {"starts_BS": STARTS}),
    "tempered bias of a factor alone": ("log_n + kerple_power_mul", {}),
    "tempered bias without a bias": ("log_n", {"starts_BS": STARTS}),
    "tempered bias without a bias, with a sink": ("log_n + sink", {"starts_BS": STARTS}),
    "sink": ("sink", {}),
    "all": (
        "log_n + sink + kerple_log + kerple_power_mul",
        {"starts_BS": STARTS, "window": 3, "decay_BHS": decay()},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_eager_is_the_formula(case):
    name, options = CASES[case]
    tempered = {"temper_bias": True} if case.startswith("tempered bias") else {}
    pos = load(name, **({"log_n": tempered} if "+" in name else tempered))
    theta = torch.rand(H, len(pos.parameters), dtype=torch.float64) + 0.1
    got = attend(*inputs(), pos, theta, scale=0.4, backend="eager", **options)
    renamed = {"starts_BS": "starts", "decay_BHS": "c", "positions_BT": "positions"}
    same = {renamed.get(name, name): value for name, value in options.items()}
    torch.testing.assert_close(
        got, by_hand(*inputs(), pos, theta, scale=0.4, **same), rtol=0, atol=1e-13
    )


def test_a_combination_has_the_parameters_of_its_terms():
    pos = load("rotary + kerple_log + alibi")
    assert pos.name == "rotary + kerple_log + alibi" and pos.learnable
    names = [p.name for p in pos.parameters]
    assert names == ["kerple_log.bias_p", "kerple_log.bias_a", "alibi.slope"]
    assert [p.name for p in pos.trained_parameters] == names[:2]
    theta = pos.initial_theta(4, torch.Generator().manual_seed(1))
    alone = load("kerple_log").initial_theta(4, torch.Generator().manual_seed(1))
    assert torch.equal(theta, torch.cat([alone, load("alibi").initial_theta(4)], dim=1))
    q, k, _ = inputs()
    assert torch.equal(pos.rotate(q, k)[1], load("rotary").rotate(q, k)[1])


@pytest.mark.parametrize(
    "name,says",
    [
        ("kerple_log + kerple_log", "kerple_log occurs twice"),
        ("learned + sinusoidal", "learned and sinusoidal exclude each other"),
        ("kerple_log + kerpel", "no positional embedding 'kerpel'"),
    ],
)
def test_combinations_that_cannot_be(name, says):
    with pytest.raises(ValueError, match=says):
        load(name)


def test_options_of_the_terms_of_a_combination():
    pos = load("rotary + rpe", rpe={"num_buckets": 8, "max_distance": 20})
    assert len(pos.parameters) == 8
    with pytest.raises(ValueError, match="rpe has no option buckets"):
        load("rotary + rpe", rpe={"buckets": 8})
    with pytest.raises(ValueError, match="num_buckets is no term of rotary \\+ rpe"):
        load("rotary + rpe", num_buckets=8)


def test_a_decay_of_large_sums_stays_exact():
    """Differences of sums near 1e6 are taken before they are rounded to fp32."""
    c = decay() + 1e6
    q, k, v = (x.float() for x in inputs())
    near = attend(q, k, v, load("none"), scale=0.4, backend="eager", decay_BHS=c)
    exact = attend(q, k, v, load("none"), scale=0.4, backend="eager", decay_BHS=decay())
    torch.testing.assert_close(near, exact, rtol=0, atol=1e-6)


def test_wrong_terms_are_refused():
    q, k, v = inputs()
    pos, use = load("none"), {"scale": 0.4, "backend": "eager"}
    with pytest.raises(AttentionError, match=r"starts_BS must be \[2, 9\] on cpu, not \[2, 8\]"):
        attend(q, k, v, pos, **use, starts_BS=STARTS[:, :8])
    with pytest.raises(AttentionError, match="starts_BS must be int32 or int64, not torch.float32"):
        attend(q, k, v, pos, scale=0.4, backend="blocked", starts_BS=STARTS.float())
    for window in (-1, 2.5):
        with pytest.raises(AttentionError, match=f"whole number, 0 or more, not {window}"):
            attend(q, k, v, pos, scale=0.4, backend="blocked", window=window)
    with pytest.raises(AttentionError, match=r"sink needs theta \[2, 1\], got none"):
        attend(q, k, v, load("sink"), **use)
    with pytest.raises(AttentionError, match="forget_gate needs decay_BHS"):
        attend(q, k, v, load("forget_gate"), **use)
    use = {"device_type": "cpu", "dtype": torch.float32, "training": False}
    chosen = choose("eager", pos, **use)
    assert math.isfinite(chosen(Call(q, k, v, pos, scale=1.0, window=2)).sum())
