"""Test fused attention of few queries to many keys: the keys are divided into parts of 256."""

from __future__ import annotations

import pytest
import torch

from megatron.attention import Call, attend, choose
from megatron.kernels import launch
from megatron.model.cache import LayerCache
from megatron.positional import load
from tests.helpers.terms import Case
from tests.kernels.cases import DEVICE, make

KINDS = ("kerple_log", "kerple_power", "alibi", "none", "rotary + kerple_log")
DECODES = {"decode": 1, "merge": 1}


@pytest.fixture(autouse=True)
def parts_of_few_keys(monkeypatch):
    assert launch.MANY == 1024
    monkeypatch.setattr(launch, "MANY", 256)


def launched(case, inputs=None, **options) -> tuple[torch.Tensor, dict[str, int]]:
    launch.LAUNCHES.clear()
    with torch.no_grad():
        out = case.out("fused", inputs, **options)
    return out, dict(launch.LAUNCHES)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return (got.double() - exact).abs().max().item() / exact.abs().max().item()


@pytest.mark.parametrize(
    "kind,group,queries",
    [
        *((kind, group, 1) for kind in KINDS for group in (1, 4, 8)),
        ("kerple_log", 8, 3),  # 24 rows: two tiles
        ("rpe", 4, 2),  # it reads a table
        ("kerple_power_mul", 4, 1),
    ],
)
def test_few_queries_in_parts(kind, group, queries):
    case = make(kind, 1, group, queries, 16, key_heads=1, keys=300)
    launch.LAUNCHES.clear()
    with torch.no_grad():
        pos, options = case.pos, {"scale": 0.35, "query_offset": 300 - queries, "return_lse": True}
        theta = case.pos.initial_theta(group, torch.Generator().manual_seed(1))
        theta = theta if case.pos.parameters else None
        inputs = [x.detach() for x in case.inputs[:3]]
        got = attend(*inputs, pos, theta, backend="fused", **options)
        wide = [None if x is None else x.double() for x in (*inputs, theta)]
        exact = attend(*wide[:3], pos, wide[3], backend="eager", **options)
    assert launch.LAUNCHES == DECODES
    allowed = 1e-5 if pos.has("rotary") else 2e-6  # fp32 angles
    assert max(error(x, y) for x, y in zip(got, exact, strict=True)) <= allowed


@pytest.mark.parametrize(
    "terms",
    (
        ["bias", "documents"],
        ["bias", "window", "sink"],  # the window hides the first part and most of the second
        ["temperature", "weight", "sink"],
        ["bias", "tempered bias"],
    ),
)
@pytest.mark.parametrize("group", (1, 4))
def test_terms_in_parts(terms, group):
    case = Case(terms, 1, 4, 3, 530, size=8, group=group, later=2)
    got, used = launched(case, case.rounded(torch.float32))
    assert used == DECODES
    assert error(got, case.out("eager", case.rounded(torch.float64))) <= 2e-6


@pytest.mark.parametrize(
    "terms,options",
    [
        (["bias", "decay"], {}),
        (["fire"], {}),
        (["bias"], {"dropout_p": 0.1}),
    ],
)
def test_other_calls_are_not_divided(terms, options):
    case = Case(terms, 1, 1, 1, 260, size=4)
    assert launched(case, case.rounded(torch.float32), **options)[1] == {"forward": 1}


def test_a_backward_pass_and_few_keys_are_not_divided():
    case = Case(["bias"], 1, 1, 1, 256, size=4)
    launch.LAUNCHES.clear()
    case.out("fused", case.rounded(torch.float32))
    assert launch.LAUNCHES == {"forward": 1}
    short = Case(["bias"], 1, 1, 1, 255, size=4)
    assert launched(short, short.rounded(torch.float32))[1] == {"forward": 1}


def test_bits_repeat_and_do_not_depend_on_the_batch():
    case = Case(["bias", "documents"], 3, 4, 1, 299, size=8, group=4)
    q, k, v, theta = case.rounded(torch.float32)
    both = launched(case, [q, k, v, theta])[0]
    assert torch.equal(both, launched(case, [q, k, v, theta])[0])
    case.options["starts_BS"] = case.options["starts_BS"][1:2]
    assert torch.equal(both[1:2], launched(case, [q[1:2], k[1:2], v[1:2], theta])[0])


def test_a_cache_with_padding_reaches_the_parts():
    """The second of two texts has 40 tokens of padding, and a window hides old tokens."""
    pos, generator = load("kerple_log"), torch.Generator().manual_seed(3)
    theta = pos.initial_theta(4, generator).to(DEVICE)
    padding = torch.tensor([0, 40], device=DEVICE)
    fused, eager = (
        choose(name, pos, device_type=DEVICE, dtype=torch.float32, masked=True)
        for name in ("fused", "eager")
    )
    for window in (None, 270):
        cache = LayerCache(padding, window)
        for count in (290, 1):
            k, v = (torch.randn(2, 1, count, 16, generator=generator).to(DEVICE) for _ in "kv")
            keys, values, _, starts_BS, offset = cache.extend(k, v, None)
        q = torch.randn(2, 4, 1, 16, generator=generator).to(DEVICE)
        options = {"starts_BS": starts_BS, "query_offset": offset, "scale": 0.25}
        call = Call(q, keys, values, pos, theta, **options, window=window)
        launch.LAUNCHES.clear()
        with torch.no_grad():
            got = fused(call)
            exact = eager(call)
        assert launch.LAUNCHES == DECODES
        assert error(got, exact.double()) <= 5e-6
