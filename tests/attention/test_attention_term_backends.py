"""Test every backend with the terms beside the distance kernel, against eager in float64."""

from __future__ import annotations

from itertools import combinations
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.attention import AttentionError
from megatron.attention.tiled import tiles
from tests.helpers.terms import TERMS, Case, assert_same

PAIRS = [*combinations(TERMS, 2)]
CROSSES = [
    ("bias", "decay", "documents"),
    ("weight", "sink", "window"),
    ("temperature", "sink", "decay"),
    ("tempered bias", "documents"),
    ("tempered bias", "documents", "sink"),
    ("tempered bias", "weight"),  # a factor alone, so there is no bias
    ("tempered bias", "bias", "bam", "documents"),
    ("tempered bias", "bias", "weight", "sink", "decay", "window"),
    TERMS,
]
SMALL_TILES = {"BUFFER_ELEMENTS": 700, "MIN_ROWS": 3, "MAX_ROWS": 16}


@pytest.mark.parametrize("terms", [*PAIRS, *CROSSES], ids=" ".join)
def test_blocked(terms):
    case = Case(terms, heads=3, queries=150, size=8)
    assert_same(case.run("blocked"), case.run("eager"), 1e-12)
    case = Case(terms, heads=4, queries=31, offset=14, later=3, group=2, seed=1)
    with mock.patch.multiple(tiles, **SMALL_TILES):
        assert_same(case.run("blocked"), case.run("eager"), 1e-12)


@given(
    terms=st.sets(st.sampled_from(TERMS)).map(lambda terms: tuple(sorted(terms))),
    batch=st.integers(1, 3),
    heads=st.integers(1, 4),
    queries=st.integers(1, 60),
    offset=st.integers(0, 40),
    window=st.integers(0, 110),
    seed=st.integers(0, 99),
    small=st.booleans(),
)
def test_blocked_in_any_shape(terms, batch, heads, queries, offset, window, seed, small):
    case = Case(terms, batch, heads, queries, offset, later=seed % 3, seed=seed)
    if "window" in terms:
        case.options["window"] = window
    with mock.patch.multiple(tiles, **(SMALL_TILES if small else {"MAX_ROWS": 128})):
        assert_same(case.run("blocked"), case.run("eager"), 1e-12)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_blocked_in_lower_precision(dtype, tolerance):
    for terms in CROSSES:
        case = Case(terms, queries=150)
        case.grad = case.grad.to(dtype).double()
        exact = [x.detach().double().requires_grad_() for x in case.rounded(dtype)]
        got = case.run("blocked", case.rounded(dtype))
        assert_same(got, case.run("eager", exact), tolerance)


@pytest.mark.parametrize("terms", [("documents",), TERMS], ids=" ".join)
def test_blocked_with_dropout(terms):
    """With v = identity, the output shows the mask; autograd with this mask is the reference."""
    case = Case(terms, queries=100, size=100)
    identity = torch.eye(100).double().expand(2, 2, -1, -1)
    q, k, v, *rest = case.inputs

    def dropped(values, seed):
        torch.manual_seed(seed)
        return case.out("blocked", [q, k, values, *rest], dropout_p=0.2)

    with mock.patch.multiple(tiles, BUFFER_ELEMENTS=9_000):
        with torch.no_grad():
            shown = dropped(identity, 1)
            assert not torch.equal(shown, dropped(identity, 2))
        out = dropped(v, 1)
        got = [out, *torch.autograd.grad(out, case.inputs, case.grad)]
    out = (case.out("eager", [q, k, identity, *rest]) * (shown != 0) / 0.8) @ v
    assert_same(got, [out, *torch.autograd.grad(out, case.inputs, case.grad)], 1e-12)


def test_blocked_is_repeatable_bit_for_bit():
    case = Case(TERMS, batch=3, heads=4, queries=333, size=16)
    results = []
    for _ in range(3):
        torch.manual_seed(3)
        results.append(case.run("blocked", case.rounded(torch.float32), dropout_p=0.1))
    for again in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], again, strict=True))


def test_numerical_gradient_of_blocked():
    case = Case(TERMS, batch=1, queries=9, size=3)
    with mock.patch.multiple(tiles, **SMALL_TILES):
        assert torch.autograd.gradcheck(lambda *x: case.out("blocked", list(x)), case.inputs)


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
@pytest.mark.parametrize("terms", [("window",), ("documents",), *PAIRS, *CROSSES], ids=" ".join)
def test_sdpa_and_flex(terms, backend):
    """They serve evaluation. `sdpa` also serves training if no term is added to the logits."""
    case = Case(terms, heads=4, queries=31, offset=14, later=3, group=2)
    if backend == "sdpa" and "weight" in terms:
        with pytest.raises(AttentionError, match="which multiplies scores"):
            case.run(backend)
        return
    with torch.no_grad():
        exact = case.out("eager", case.inputs)
        assert_same([case.out(backend, case.inputs)], [exact], 1e-12)
        half = case.out(backend, case.rounded(torch.bfloat16))
        assert half.dtype == torch.bfloat16
        assert_same([half], [exact], 3e-2)
    if backend == "sdpa" and not {"bias", "decay", "sink"}.intersection(terms):
        assert_same(case.run(backend), case.run("eager"), 1e-12)
    else:
        match = "no backward pass on a CPU" if backend == "flex" else "memory quadratic in the"
        with pytest.raises(AttentionError, match=match):
            case.run(backend)


@pytest.mark.parametrize("backend", ["eager", "blocked", "sdpa", "flex"])
def test_a_packed_batch_gives_each_document_alone(backend):
    case = Case(("bias", "decay", "documents", "sink"), queries=90)
    starts_BS = case.options.pop("starts_BS")
    with torch.no_grad():
        packed = case.out(backend, case.inputs, starts_BS=starts_BS)
        q, k, v, theta, c = case.inputs
        for b, starts in enumerate(starts_BS):
            assert len(starts.unique()) > 1
            for first in starts.unique().tolist():
                own = slice(first, first + int((starts == first).sum()))
                alone = [x[b : b + 1, :, own] for x in (q, k, v)]
                out = case.out(backend, [*alone, theta, c[b : b + 1, :, own]])
                assert_same([packed[b : b + 1, :, own]], [out], 1e-12)


def test_a_long_decay_stays_as_exact_as_a_short_one():
    """The decay falls by 0.7 for each token, like that of a new forget gate."""
    errors = []
    for keys in (512, 65_536):
        case = Case(("decay",), 1, 1, 160, keys - 160, size=8)
        case.inputs[3] = (-1.4 * torch.rand(1, 1, keys).double()).cumsum(-1).requires_grad_()
        case.grad = case.grad.float().double()
        inputs = case.rounded(torch.float32)
        exact = case.run("eager", [x.detach().double().requires_grad_() for x in inputs])
        pairs = zip(case.run("blocked", inputs), exact, strict=True)
        errors.append([((x - y).abs().max() / y.abs().max()).item() for x, y in pairs])
    for short, long in zip(*errors, strict=True):
        assert long < max(2 * short, 5e-7) and short < 5e-6


def test_only_visible_keys_cost_anything():
    """Eight documents, or a window, need a fraction of the scores."""
    length = 4096
    starts = [[(length - 1 - r) // 512 * 512 for r in range(length)]]
    odd = [[max(start - 7, 0) for start in starts[0]]]

    def scores(*limits):
        return sum(tile.size for tile in tiles.walk(1, 1, length, length, *limits))

    assert scores(starts) < 1.25 * scores() / 8
    assert scores(odd) < 1.4 * scores() / 8
    assert scores(None, 256) < scores() / 5


def test_unused_entries_of_a_cache_are_never_read():
    case = Case(("decay", "documents"), 2, 2, 5, 20, later=4)
    exact = case.run("eager")
    with torch.no_grad():
        for x in (*case.inputs[1:3], case.inputs[3]):
            x[:, :, 25:] = torch.nan
    assert_same(case.run("blocked")[:1], exact[:1], 1e-12)
