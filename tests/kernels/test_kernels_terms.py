"""Test the fused kernels with the terms beside the distance kernel, against eager in float64."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.kernels import tile_sizes
from megatron.kernels.tile_sizes import Tile
from tests.helpers.terms import TERMS, Case, assert_same
from tests.kernels.cases import TOLERANCE

OTHERS = ("sink", "decay", "documents", "window")
"""The terms that the kernels compute themselves, beside the distance kernel."""
KINDS = ("bias", "weight", "table")
PAIRS = [*combinations(OTHERS, 2), *((kind, term) for kind in KINDS for term in OTHERS)]
CROSSES = [
    ("bias", "decay", "documents"),
    ("weight", "sink", "window"),
    ("table", "sink", "decay", "documents"),
    ("tempered bias", "documents"),
    ("tempered bias", "bam", "decay", "documents"),
    TERMS,
]


def check(case: Case, dtype: torch.dtype = torch.float32, tolerance: float | None = None) -> None:
    """Compare the output and all gradients with those of eager in float64."""
    case.grad = case.grad.to(dtype).double()
    inputs = case.rounded(dtype)
    exact = case.run("eager", [x.detach().double().requires_grad_() for x in inputs])
    assert_same(case.run("fused", inputs), exact, tolerance or TOLERANCE[dtype])


@pytest.mark.parametrize("terms", [*zip(OTHERS), *PAIRS], ids=" ".join)
def test_every_term_and_pair(terms):
    check(Case(terms, 1, 2, 21, 14, size=8, later=3, seed=1))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("terms", CROSSES, ids=" ".join)
def test_crosses_of_three(terms, dtype):
    """There are shared key heads, an incomplete tile, and keys before and after the queries."""
    check(Case(terms, 1, 2, 37, 11, size=8, later=5, group=2), dtype)


@settings(max_examples=8)
@given(
    terms=st.sets(st.sampled_from((*TERMS, "table")), min_size=1),
    batch=st.integers(1, 2),
    queries=st.integers(1, 50),
    offset=st.integers(0, 40),
    later=st.integers(0, 3),
    window=st.integers(0, 70),
    seed=st.integers(0, 99),
)
def test_any_shape(terms, batch, queries, offset, later, window, seed):
    case = Case(
        sorted(terms), batch, 2, queries, offset, later=later, group=1 + seed % 2, seed=seed
    )
    if "window" in terms:
        case.options["window"] = window
    check(case)


def test_blocks_of_rows_that_share_a_reference():
    """The decay of a row is relative to that of the first of 128 rows, in every pass."""
    check(Case(("table", "sink", "decay"), 1, 1, 140, 7, size=8))


@pytest.mark.parametrize("terms", [("bias", "sink", "decay", "documents"), ("table", "window")])
def test_dropout(terms):
    """With v = identity, the output shows the mask; autograd with this mask is the reference."""
    case = Case(terms, 1, 2, 40, size=40)
    q, k, v, *rest = case.rounded(torch.float32)
    identity = torch.eye(40).expand(1, 2, -1, -1)

    def dropped(values):
        torch.manual_seed(1)
        return case.out("fused", [q, k, values, *rest], dropout_p=0.2)

    with torch.no_grad():
        shown = dropped(identity)
    out = dropped(v)
    got = [out, *torch.autograd.grad(out, [q, k, v, *rest], case.grad.float())]
    inputs = [x.detach().double().requires_grad_() for x in (q, k, v, *rest)]
    q, k, v, *rest = inputs
    out = (case.out("eager", [q, k, identity.double(), *rest]) * (shown != 0) / 0.8) @ v
    exact = [out, *torch.autograd.grad(out, inputs, case.grad.float().double())]
    assert_same(got, exact, TOLERANCE[torch.float32])


@pytest.mark.parametrize("terms", [TERMS, ("table", "sink", "decay", "documents")], ids=" ".join)
def test_repeated_bit_for_bit(terms):
    case, results = Case(terms, 2, 2, 40, size=16), []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(case.run("fused", case.rounded(torch.float32), dropout_p=0.1))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_a_packed_batch_gives_each_document_alone():
    case = Case(("bias", "decay", "documents", "sink"), 1, 2, 70, size=8, seed=2)
    starts = case.options.pop("starts_BS")
    with torch.no_grad():
        q, k, v, theta, c = case.rounded(torch.float32)
        packed = case.out("fused", [q, k, v, theta, c], starts_BS=starts)
        assert len(starts.unique()) > 2
        for first in starts.unique().tolist():
            own = slice(first, first + int((starts == first).sum()))
            out = case.out("fused", [*(x[:, :, own] for x in (q, k, v)), theta, c[:, :, own]])
            assert_same([packed[:, :, own]], [out], 1e-5)


@pytest.mark.parametrize("terms", [("bias", "documents"), ("table", "documents")], ids=" ".join)
def test_tiles_of_other_documents_are_never_read(terms):
    """Documents of whole tiles. NaN in the first stays there, in every pass."""
    case = Case(terms, 1, 1, 64, size=8)
    case.options["starts_BS"] = torch.arange(64)[None] // 32 * 32
    inputs = case.rounded(torch.float32)
    clean = case.run("fused", inputs)[:4]
    with torch.no_grad():
        for x in (*inputs[:3], case.grad):
            x[:, :, :32] = torch.nan
    for x, y in zip(case.run("fused", inputs), clean, strict=False):
        assert torch.equal(x[:, :, 32:], y[:, :, 32:])


def test_a_long_decay_stays_as_exact_as_a_short_one(monkeypatch):
    """The decay falls by 0.7 for each token, like that of a new forget gate.

    The rows are the last of 512 tokens, of 512 whose decay starts at 1e6, and of 65,536.
    """
    errors = []
    for keys, first in ((512, 0.0), (512, 1e6), (65_536, 0.0)):
        if keys > 512:  # wide tiles, which take the interpreter less time
            monkeypatch.setattr(tile_sizes, "SMALL", Tile(16, 8192, 4, 1))
        case = Case(("decay", "sink"), 1, 1, 20, keys - 20, size=8)
        case.inputs[4] = (first - 1.4 * torch.rand(1, 1, keys).double().cumsum(-1)).requires_grad_()
        inputs = case.rounded(torch.float32)
        exact = case.run("eager", [x.detach().double().requires_grad_() for x in inputs])
        pairs = zip(case.run("fused", inputs), exact, strict=True)
        errors.append([((x - y).abs().max() / y.abs().max()).item() for x, y in pairs])
    for short, *others in zip(*errors, strict=True):
        assert max(others) < max(2 * short, 1e-6) and short < 5e-6, errors


def test_unused_entries_of_a_cache_are_never_read():
    case = Case(("decay", "documents"), 2, 2, 5, 20, later=4, size=8)
    inputs = case.rounded(torch.float32)
    clean = case.run("fused", inputs)
    with torch.no_grad():
        for x in (*inputs[1:3], inputs[3]):
            x[:, :, 25:] = torch.nan
    assert all(torch.equal(x, y) for x, y in zip(case.run("fused", inputs), clean, strict=True))
