"""Test that the fused Triton kernels compile for real GPUs, without having one, and fit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

from megatron.kernels.tile_sizes import Needs, look_up
from tests.helpers.paths import ROOT
from tools import compile_kernels as tool
from tools.compiled.machine_code import special_functions

WITHOUT_INTERPRETER = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}

SAMPLE = (
    r"^(sm_90 (kerple_log|rpe) \w+ bf16 64|sm_90 kerple_log \w+ bf16 (128 dropout|(64|128) group 4)"
    r"|sm_90 kerple_power_add_mul \w+ fp16 128|sm_80 kerple_log \w+ bf16 (64|128 group 4)"
    r"|sm_86 none \w+ fp32 16)$"
)

GOOD = tool.Row(
    90, "x", "query", "bf16", 64, triton="3.7.1", M=64, N=64, warps=4, stages=3, registers=255,
    spilled=0, shared=100_000, serialised=0, special_functions_per_score=2.0,
)  # fmt: skip


def chosen(variant):
    return bool(re.search(SAMPLE, variant.name))


@pytest.mark.timeout(600)
def test_a_sample_compiles_and_neither_spills_nor_is_serialised(tmp_path):
    """The sample has every Triton kernel, mostly for Hopper GPUs, and equals the committed rows."""
    done = subprocess.run(
        [sys.executable, "tools/compile_kernels.py", "--only", SAMPLE, "--out", tmp_path / "t.csv"],
        cwd=ROOT, env=WITHOUT_INTERPRETER, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in tool.read_rows(tmp_path / "t.csv") if chosen(row.variant)]
    assert [row.variant for row in rows] == list(filter(chosen, tool.variants()))
    assert len(rows) == 28 and "28 kernels compiled" in done.stderr
    assert not any(row.spilled or row.serialised for row in rows)
    assert all(32 <= row.registers <= 255 and row.shared > 0 for row in rows)
    assert all(1 <= row.special_functions_per_score <= 6 for row in rows)
    committed = tool.read_rows(tool.CSV)
    if rows[0].triton == committed[0].triton:
        assert set(rows) <= set(committed), "run tools/compile_kernels.py"


@pytest.mark.timeout(300)
def test_no_product_of_blackwell_reads_copies_before_a_fence():
    """With three stages instead of one, the query pass would."""
    usual = [f"{name}:64" for name in ("kerple_log:forward", "kerple_log:query", "kerple_log:key")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.ptx.fences", *usual, "kerple_log:query:64:64x32x4x3"],
        cwd=ROOT, env=WITHOUT_INTERPRETER, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*["ok"] * 3, "UNFENCED"]


def test_every_pass_of_blackwell_has_such_tiles():
    for size, needs in product((16, 64, 128, 256), (Needs(), Needs(True, True, 9, True, True))):
        tiles, hopper = look_up(100, 2, size, needs), look_up(90, 2, size, needs)
        assert tiles.query.stages == tiles.key.stages == 1
        assert size == 256 or min(hopper.query.stages, hopper.key.stages) > 1


def test_the_committed_table_is_clean_and_has_the_usual_variants():
    rows, listed = tool.read_rows(tool.CSV), list(tool.variants())
    assert len(set(listed)) == len(listed) <= 2650
    known = {row.variant for row in rows}
    assert [row.variant for row in rows] == [v for v in listed if v in known]
    usual = {v for v in listed if v.name.startswith("sm_90") and v.head_size in tool.USUAL}
    usual = {v for v in usual if v.dtype != "fp32"} | set(filter(chosen, listed))
    assert usual <= known, "run tools/compile_kernels.py --changed"
    assert not [row.wrong for row in rows if row.wrong]
    assert len({row.triton for row in rows}) == 1


def test_the_table_has_groups_of_heads_without_spills():
    rows = [row for row in tool.read_rows(tool.CSV) if row.group > 1]
    assert {row.target for row in rows} == {80, 86, 90}
    assert {row.kernel for row in rows} == set(tool.GROUPED) and not any(x.spilled for x in rows)
    passes = {*product(("query", "key"), tool.HALF), ("decode", "bf16"), ("merge", "bf16")}
    assert {(row.which, row.dtype) for row in rows} == passes


def test_the_committed_table_is_of_the_present_tiles(monkeypatch):
    rows = tool.read_rows(tool.CSV)
    wanted = [row.variant for row in rows]
    monkeypatch.setattr(tool.triton, "__version__", rows[0].triton)
    assert list(tool.unchanged(rows, wanted).values()) == rows, "compile anew"
    changed = replace(rows[7], stages=rows[7].stages + 1)
    assert list(tool.unchanged([*rows[:7], changed, *rows[8:]], wanted)) == wanted[:7] + wanted[8:]
    monkeypatch.setattr(tool.triton, "__version__", "another")
    assert not tool.unchanged(rows, wanted)


def test_scores_at_equal_distances_share_special_functions():
    """One exp2 per score, and log2 (and 1/x) for 18 of 32, or 10 of 16, scores of a thread."""
    rows = {row.variant.name: row for row in tool.read_rows(tool.CSV)}
    for which, most in (("forward", 1.63), ("query", 1.94), ("key", 1.57)):
        assert rows[f"sm_90 kerple_log {which} bf16 64"].special_functions_per_score <= most


def test_tiles_are_the_same_after_any_other_call():
    before = [look_up(90, 2, size, Needs(dropout=True)) for size in tool.USUAL]
    for size in tool.USUAL:
        look_up(90, 2, size, Needs(heavy=True, dropout=True, columns=9, terms=True, layer=True))
    assert [look_up(90, 2, size, Needs(dropout=True)) for size in tool.USUAL] == before


def test_a_bad_row_is_seen():
    assert GOOD.wrong is None
    for change, why in (
        ({"spilled": 8}, "a thread spills 8 bytes"),
        ({"spilled": 8, "dropout": 1}, "bf16 64 dropout: a thread spills 8 bytes"),
        ({"serialised": 1}, "matrix products wait for each other"),
        ({"shared": 232_449}, "232449 bytes of shared memory of 232448"),
        ({"target": 86, "shared": 101_377}, "shared memory"),
        ({"target": 120, "shared": 101_377}, "shared memory"),
        ({"target": 100, "spilled": 8}, "a thread spills 8 bytes"),
    ):
        assert why in (replace(GOOD, **change).wrong or "")
    for change in ({"dtype": "fp32"}, {"head_size": 256}):  # only recorded
        assert replace(GOOD, spilled=8, **change).wrong is None


def test_the_summary_counts_spills_and_serialised_products():
    rows = [GOOD, replace(GOOD, spilled=8), replace(GOOD, serialised=1, spilled=4, dtype="fp32")]
    head, *wrong = tool.summary(rows).splitlines()
    assert head == "3 variants: 2 spill registers, 1 have serialised products" and len(wrong) == 2


def test_special_functions_are_counted_in_the_costliest_inner_loop():
    """The loop 5 has none, as the loop over the knees of fire: the loop 2 around it counts."""
    ptx = """
$L__BB0_1:
    ex2.approx.ftz.f32 %r1, %r2;
$L__BB0_2:
    lg2.approx.f32 %r1, %r2;
    rcp.approx.ftz.f32 %r1, %r2;
$L__BB0_5:
    mul.f32 %r1, %r2, %r3;
    @%p4 bra $L__BB0_5;
    @%p1 bra $L__BB0_2;
    @%p2 bra $L__BB0_1;
$L__BB0_3:
    ex2.approx.ftz.f32 %r1, %r2;
    @%p3 bra $L__BB0_4;
    @%p2 bra $L__BB0_3;
$L__BB0_4:
    ret;
"""
    assert special_functions(ptx) == 2
    assert special_functions("ret;") == 0


def test_sources_are_printed():
    done = subprocess.run(
        [sys.executable, "tools/compile_kernels.py", "--source", "kerple_log"],
        cwd=ROOT,
        env=WITHOUT_INTERPRETER,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "def evaluate(s, di, dj, d, c, row):" in done.stdout
