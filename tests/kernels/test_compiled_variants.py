"""Test that cached launches launch the kernels that Triton would choose.

Triton chooses the kernels, but compiles and launches nothing (`benchmarks.host.launch_time`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs
from triton.runtime.jit import JITFunction

from benchmarks.host import launch_time
from megatron.attention import cache_launches
from megatron.attention.fused import functions_of
from megatron.kernels import compiled_variants
from megatron.kernels.compiled_variants import NUMBERS, Variant, order, variant_of
from megatron.kernels.documents_sink_decay import TENSORS
from megatron.kernels.tile_sizes import Tile
from megatron.positional import load

BIG = 1 << 31
STRIDES = (0, 1, 2, 8, 16, 17, 48, 1024, BIG - 1, BIG, BIG + 16)
COUNTS = (1, 2, 3, 16, 48, BIG - 1, BIG, 2 * BIG)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32)
STORAGE = {dtype: torch.empty(64, dtype=dtype) for dtype in DTYPES}
PLACES = (0, 1, 2, 4, 8, 16)
"""Numbers of elements before a tensor, in memory that is aligned to 64 bytes."""


@pytest.fixture
def launches(monkeypatch) -> Iterator[list[tuple]]:
    """Return the list of all launches: (kernel, grid, stream, hooks, kernel's name, arguments)."""
    found = []

    def launch(kernel, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        found.append((kernel, (x, y, z), stream, (enter, leave), metadata.get(), arguments))

    monkeypatch.setattr(launch_time.NoKernel, "launch", launch)
    for name, function in compiled_variants.PASSES.items():
        if not isinstance(function, JITFunction):  # but one of Triton's interpreter
            function = JITFunction(function.fn, **function.kwargs)
        monkeypatch.setitem(compiled_variants.PASSES, name, function)
    variant_of.cache_clear()
    with launch_time.without_a_gpu():
        yield found
    cache_launches(False)
    variant_of.cache_clear()


embedding = cache(load)  # another object has other device functions


def tensor(dtype: torch.dtype, place: int) -> torch.Tensor:
    return STORAGE[dtype][place:]


def kernel(which: str) -> Variant:
    """Return a Triton kernel without the tensors of sinks, documents, windows and decay."""
    needed = tuple(name for name in order(which)[0] if name not in TENSORS)
    functions, _ = functions_of(embedding("rpe" if which == "table" else "kerple_log"))
    return variant_of(which, functions, Tile(16, 16, 4, 1), 16, needed, dropout=False, theta=True)


def start(which: str, arguments: dict[str, Any], *, cached: bool) -> None:
    tensors, strided, _ = order(which)
    cache_launches(cached)
    kernel(which).start(
        (3, 1),
        [arguments.get(name) for name in tensors],
        [arguments[f"{name}_{axis}"] for name in strided for axis in "bht"],
        [arguments[name] for name in NUMBERS],
    )


@st.composite
def calls(draw, which: str) -> list[dict[str, Any]]:
    """Draw the arguments of some calls, each of which differs from another in few arguments."""
    tensors, strided, _ = order(which)
    places = st.builds(tensor, st.sampled_from(DTYPES), st.sampled_from(PLACES))
    kinds = {name: places for name in tensors if name not in TENSORS}
    kinds |= {f"{name}_{axis}": st.sampled_from(STRIDES) for name in strided for axis in "bht"}
    kinds |= {name: st.sampled_from(COUNTS) for name in NUMBERS}
    kinds |= {name: st.sampled_from((0.5, 1.0)) for name in ("scale", "rescale")}
    found = [{name: draw(kind) for name, kind in kinds.items()}]
    for _ in range(4):
        changed = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=2))
        found.append(draw(st.sampled_from(found)) | {name: draw(kinds[name]) for name in changed})
    return found


@pytest.mark.parametrize("which", ["forward", "query"])
def test_the_kernel_is_the_one_that_triton_chooses(launches, which):
    @settings(max_examples=25, deadline=None)
    @given(calls(which))
    def check(some):
        for arguments in some:
            launches.clear()
            for cached in (False, True, True):
                start(which, arguments, cached=cached)
            assert launches[0] == launches[1] == launches[2]

    check()


def usual(which: str) -> dict[str, Any]:
    """Return arguments of `start`."""
    tensors, strided, _ = order(which)
    found: dict[str, Any] = {x: STORAGE[torch.float32] for x in tensors if x not in TENSORS}
    found |= {f"{name}_{axis}": 16 for name in strided for axis in "bht"}
    return found | dict.fromkeys(NUMBERS, 2) | {"scale": 0.5, "rescale": 1.0}


def test_all_groups_of_heads_above_one_share_a_kernel(launches):
    """So the rows of `tools/compiled_kernels.csv` for groups of 4 also hold for 2, 8 and 16."""
    for group in (4, 2, 8, 16, 1):
        start("key", usual("key") | {"group": group}, cached=False)
    kernels = [kernel for kernel, *_ in launches]
    assert all(kernel is kernels[0] for kernel in kernels[:4]) and kernels[4] is not kernels[0]


def test_a_cached_launch_does_not_search(launches, monkeypatch):
    start("forward", usual("forward"), cached=True)
    monkeypatch.setattr(JITFunction, "run", None)
    start("forward", usual("forward"), cached=True)
    start("forward", usual("forward") | {"keys": 3, "offset": 1}, cached=True)
    assert [kernel for kernel, *_ in launches] == [launches[0][0]] * 3
    with pytest.raises(TypeError):  # a stride that is no multiple of 16
        start("forward", usual("forward") | {"k_t": 17}, cached=True)
    with pytest.raises(TypeError):
        start("forward", usual("forward"), cached=False)


def test_stream_and_hooks_are_those_of_the_moment(launches, monkeypatch):
    start("forward", usual("forward"), cached=True)
    driver = triton.runtime.driver.active
    monkeypatch.setattr(driver, "get_current_stream", lambda device: 7, raising=False)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", "enter")
    before = []
    monkeypatch.setattr(compiled_variants.PASSES["forward"], "pre_run_hooks", [])
    start("forward", usual("forward"), cached=True)
    compiled_variants.PASSES["forward"].add_pre_run_hook(
        lambda *_, **__: before.append(len(launches))
    )
    start("forward", usual("forward"), cached=True)
    assert [each[2] for each in launches] == [0, 7, 7]
    assert [each[3][0] for each in launches[1:]] == ["enter"] * 2
    assert launches[1][4]["stream"] == 7
    assert before == [2]


def test_the_cache_is_bounded(launches, monkeypatch):
    monkeypatch.setattr(compiled_variants, "LARGEST", 3)
    for n in range(10):
        start("forward", usual("forward") | {"q_t": 16 * n}, cached=True)
        assert 1 <= len(kernel("forward").compiled) <= 3
    assert len({id(kernel) for kernel, *_ in launches}) == 1  # all are multiples of 16


def test_the_benchmark(launches, tmp_path, capsys):
    tiny = "--rounds 1 --heads 2 --length 16 --head-size 16 --profile --out"
    launch_time.run(launch_time.parser().parse_args([*tiny.split(), str(tmp_path / "time")]))
    table = (tmp_path / "time.md").read_text()
    text = capsys.readouterr().out
    assert table in text and "function calls" in text
    assert table.count("| forward and backward |") == 2
    assert (tmp_path / "time.png").read_bytes().startswith(b"\x89PNG")
    # Forward passes launch one kernel and backward passes two more; profiles come after them.
    rounds, calls = 2 * 2 * launch_time.ROUND, 1 + launch_time.ROUND
    assert len(launches) == rounds * (1 + 3 + 1 + 3) + 2 * 3 * calls
