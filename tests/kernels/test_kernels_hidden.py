"""Test a bias with hidden units, which depends on the position, in the fused kernels.

FIRE has few hidden units here, because the interpreter takes long for each.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.attention import AttentionError, attend, choose
from megatron.attention.fused import functions_of
from megatron.kernels import launch
from megatron.positional import load
from tests.helpers.terms import Case, assert_same
from tests.kernels.cases import TOLERANCE
from tests.kernels.test_kernels_terms import check

FIRE = {"length": 20, "width": 4}


def case_of(pos, terms=(), *shape, **options):
    """Return a case of this embedding: the knees are where u is, the slopes have either sign."""
    case = Case(terms, *shape, **options)
    case.pos = pos
    heads, generator = case.inputs[0].shape[1], torch.Generator().manual_seed(3)
    theta = pos.initial_theta(heads, generator) + 0.1 * torch.rand(heads, 1, generator=generator)
    case.inputs.insert(3, theta.double().requires_grad_())
    return case


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("name", "terms"),
    [
        ("fire", ()),
        ("kerple_log + fire + gaussian_mul", ("documents",)),
        ("fire + forget_gate + sink + log_n", ("decay", "documents", "window")),
    ],
)
def test_terms(name, terms, dtype):
    """There are shared key heads, an incomplete tile, and keys before and after the queries."""
    pos = load(name, **({"fire": FIRE} if "+" in name else FIRE))
    assert functions_of(pos)[1] == "evaluated in registers"
    check(case_of(pos, terms, 1, 2, 21, 11, size=8, later=5, group=2), dtype)


@settings(max_examples=3)
@given(
    queries=st.integers(1, 20),
    offset=st.integers(0, 20),
    scale=st.sampled_from([1.0, 0.4]),
    zero=st.sampled_from(["w", "b", "both"]),
)
def test_any_shape(queries, offset, scale, zero):
    """Some hidden units have no knee, or their knee is at distance 0."""
    case = case_of(load("fire", **FIRE).scaled(scale), (), 1, 2, queries, offset, size=8)
    with torch.no_grad():
        case.inputs[3][:, [3] if zero != "b" else []] = 0.0
        case.inputs[3][:, [7] if zero != "w" else []] = 0.0
    check(case)


def test_distances_within_one_line_cost_no_search():
    """Far from each other, most tiles have all u between two knees; their values are exact, too."""
    case = case_of(load("fire", **FIRE), (), 1, 1, 17, 240, size=8)
    check(case)


def test_dropout_and_the_same_bits():
    case, results = case_of(load("fire", **FIRE), (), 1, 2, 24, size=8), []
    for _ in range(2):
        torch.manual_seed(3)
        before = launch.LAUNCHES["hidden"]
        results.append(case.run("fused", case.rounded(torch.float32), dropout_p=0.3))
        assert launch.LAUNCHES["hidden"] == before + 1
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    out, *_, dtheta = results[0]
    step, values = 1e-2, []
    for sign in (1, -1):  # the mask is the same, so differences show the gradient with dropout
        inputs = [x.detach().clone() for x in case.rounded(torch.float32)]
        inputs[3][:, 10:] += sign * step
        torch.manual_seed(3)
        out = case.out("fused", inputs, dropout_p=0.3)
        values.append((out.double() * case.grad).sum())
    assert_same([(values[0] - values[1]) / (2 * step)], [dtheta[:, 10:].sum().double()], 1e-3)


def test_a_bias_that_no_table_can_hold_is_refused_by_name():
    request = {"device_type": "cpu", "dtype": torch.float32}
    with pytest.raises(AttentionError, match=r"cannot evaluate fire \+ rpe in registers"):
        choose("fused", load("fire + rpe"), **request)
    with pytest.raises(AttentionError, match=r"cannot evaluate fire \+ rpe in registers"):
        choose("fused", load("fire + rpe + sink"), **request)
    assert choose("auto", load("fire + rpe"), **request).name == "blocked"


@pytest.mark.parametrize("name", ["fire + sink", "fire + log_n", "fire + gaussian_mul + sink"])
def test_a_start_asks_for_the_kernel_that_runs(name):
    """Without the sink and the temperature, which are computed beside the kernel."""
    choice = choose("fused", load(name), device_type="cpu", dtype=torch.float32)
    assert "evaluated in registers" in choice.reason
    pos = load(name)
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    theta = pos.initial_theta(2, torch.Generator().manual_seed(1))
    found = attend(q, k, v, pos, theta, backend="fused")
    torch.testing.assert_close(found, attend(q, k, v, pos, theta, backend="eager"))
