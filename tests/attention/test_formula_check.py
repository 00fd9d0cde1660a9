"""Test what the first call of an embedding finds in its formula and theta, and what it keeps."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from megatron.attention import AttentionError, attend
from megatron.attention.formulas import trace
from megatron.positional import (
    PositionalEmbedding,
    PositionalError,
    ThetaParameter,
    load,
    within_bounds,
)

KERPLE = load("kerple_log")


def inputs(heads=4, key_heads=4):
    shapes = [(2, n, 7, 8) for n in (heads, key_heads, key_heads)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


class Root(PositionalEmbedding):
    """b(d) = -a sqrt(d + 1)."""

    parameters = (ThetaParameter("a", low=0.0),)

    def bias(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return -a * torch.sqrt(d + 1)


class Bare(Root):
    """Its gradient at distance 0 is 0 * inf."""

    def bias(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return -torch.sqrt(a * d)


class Where(Root):
    def bias(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return torch.where(d > 0, -torch.sqrt(a * d), 0.0)


class Flat(Root):
    def bias(self, theta_HN, d):
        return -theta_HN[:, 0] * d.sum()


class Log(Root):
    """It hides each token from itself."""

    def bias(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return a * torch.log(d)


class Ratio(Root):
    def bias(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return torch.exp(-a * (d / (d * 2)))


class Table(Root):
    def bias(self, theta_HN, d):
        return theta_HN[:, :1, None] * torch.arange(64.0)[d.long()].to(theta_HN)


class Sums(Root):
    def bias(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return -a * torch.ones_like(d).cumsum(-1)


class Largest(Root):
    def bias(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return -a * d / d.max()


class Rows(Root):
    def bias(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return -a * d.cumsum(-2)


class Random(Root):
    def bias(self, theta_HN, d):
        d, a = self.columns(theta_HN, d)
        return -a * torch.rand_like(d)


@pytest.mark.parametrize("pos", [Sums(), Largest(), Rows(), Random()])
def test_a_formula_treats_each_distance_by_itself(pos):
    q, k, v = inputs()
    with pytest.raises(AttentionError, match="values for the same distances in another order"):
        attend(q, k, v, pos, torch.ones(4, 1))


def test_fp32_bounds_are_bounds_in_fp64_too():
    """The bound 0.01 is a little larger in fp64 than the nearest fp32 number."""
    pos = load("kerple_log")
    theta = within_bounds(torch.tensor([[1.0, 0.0]] * 4), pos.parameters)
    assert theta[0, 1].item() < 0.01
    for each in (theta.double(), theta.double().clamp(min=0.01)):
        assert attend(*inputs(), pos.scaled(0.125), each).isfinite().all()


@pytest.mark.parametrize(
    "pos, theta, message",
    [
        (KERPLE.scaled(0.5), [[0.5, 0.5], [0.5, 0.001]],
         r"theta's column bias_a is 0.001 in head 1, but must lie in \[0.01, inf\]; clamp"),
        (KERPLE.scaled(0.25), [[0.5, 0.5], [float("nan"), 1]], "theta's column bias_p is nan in"),
        (Bare(), [[1.0], [2.0]], r"Bare.bias: its gradient .* at distance 0 is NaN for theta \[1"),
        (Where(), [[1.0], [2.0]], "first in sqrt; .* torch.where does not help"),
        (Log(), [[1.0], [2.0]], r"Log.bias: its value at distance 0 is -inf .*, first in log;"),
        (Ratio(), [[1.0], [2.0]], r"Ratio.bias: its value at distance 0 is NaN .*, first in div;"),
        (Table(), [[1.0], [2.0]],
         r"Table.bias: index 250 is out .* write values for distances up to 4099, or clamp d"),
        (Flat(), [[1.0], [2.0]], r"Flat.bias has returned the shape \[2\] for 2 heads"),
    ],
)  # fmt: skip
def test_the_first_call_checks_formula_and_theta(pos, theta, message):
    q, k, v = inputs(heads=2, key_heads=1)
    with pytest.raises(AttentionError, match=message):
        attend(q, k, v, pos, torch.tensor(theta))


@pytest.mark.parametrize("pos, name", [(Bare(), "sqrt"), (Log(), "log")])
def test_compiling_checks_the_formula(pos, name):
    """With initial values of theta, which do not draw from the caller's random numbers."""
    q, k, v = (x.float() for x in inputs())
    pos = pos.scaled(0.75)  # not the one that another test has called

    def call(q):
        return attend(q, k, v, pos, torch.ones(4, 1))

    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match=f"AttentionError: .* first in {name}; change"):
        torch.compile(call, backend="eager")(q)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_check_sees_no_mode_of_the_caller():
    """Neither hooks on saved tensors, nor their refusal, nor inference mode, nor a device."""
    pos, kept = KERPLE.scaled(0.3), []
    q, k, v = (x.float() for x in inputs())
    theta = KERPLE.initial_theta(4)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attend(q, k, v, pos, theta)
    assert kept == []
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        attend(q, k, v, KERPLE.scaled(0.31), theta)
    with torch.inference_mode(), torch.device("meta"):
        attend(q, k, v, KERPLE.scaled(0.32), theta)


def test_a_misspelled_method_is_refused():
    with pytest.raises(PositionalError, match="defines biass, .* did you mean bias?"):

        class Misspelled(PositionalEmbedding):
            def biass(self, theta_HN, d):
                return -d

    class Helped(PositionalEmbedding):
        kind = "distance"

        def slopes(self):
            return 1.0


def test_an_embedding_does_not_change():
    pos = load("rpe")
    with pytest.raises(AttributeError, match="scale of Rpe cannot change after construction"):
        pos.scale = 3.0
    assert pos.changed(distance_scale=2.0).distance_scale == 2.0 and pos.distance_scale == 1.0


def test_equal_embeddings_share_what_was_read():
    trace.read.cache_clear()
    for _ in range(5):
        trace.read(Root())
        trace.read(load("kerple_log + alibi"))
    assert trace.read.cache_info().misses == 2
    assert load("rpe", num_buckets=16) != load("rpe") == load("rpe") != load("alibi")
    assert KERPLE.scaled(2.0) == KERPLE.scaled(2.0) != KERPLE
    for again in (copy.deepcopy(KERPLE), pickle.loads(pickle.dumps(KERPLE))):
        assert again == KERPLE and hash(again) == hash(KERPLE)
