"""Test that the fused Triton kernels compile for real GPUs, without having one, and fit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import astuple, fields, replace

import pytest

from tests.helpers.paths import ROOT
from tools import compile_kernels as tool

WITHOUT_INTERPRETER = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}


@pytest.mark.timeout(600)
def test_a_dozen_variants_compile_and_spill_nothing(tmp_path):
    """The variants include every Triton kernel, for Ampere and for Hopper GPUs."""
    done = subprocess.run(
        [sys.executable, "tools/compile_kernels.py", "--sample", "--out", str(tmp_path / "t.csv")],
        cwd=ROOT, env=WITHOUT_INTERPRETER, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = tool.read_rows(tmp_path / "t.csv")
    assert len(tool.SAMPLE) == 12 and len(rows) == len(list(tool.variants(sample=True))) == 38
    assert all(32 <= row.registers <= 255 and row.shared > 0 for row in rows)
    assert {row.target for row in rows} == {"sm_80", "sm_86", "sm_90"}


def test_the_committed_table_is_whole_and_clean():
    rows = tool.read_rows(tool.CSV)
    listed = [(f"sm_{v.target}", v.kernel, v.which, v.dtype, v.head_size)
              for v in tool.variants(sample=False)]  # fmt: skip
    assert [astuple(row)[1:6] for row in rows] == listed, "run tools/compile_kernels.py"
    assert not [row.wrong for row in rows if row.wrong]
    assert len({row.triton for row in rows}) == 1


def test_the_committed_table_is_of_the_present_tiles(monkeypatch):
    rows, wanted = tool.read_rows(tool.CSV), list(tool.variants(sample=False))
    monkeypatch.setattr(tool.triton, "__version__", rows[0].triton)
    assert list(tool.unchanged(rows, wanted).values()) == rows, "compile anew"
    changed = replace(rows[7], stages=rows[7].stages + 1)
    assert list(tool.unchanged([*rows[:7], changed, *rows[8:]], wanted)) == wanted[:7] + wanted[8:]
    monkeypatch.setattr(tool.triton, "__version__", "another")
    assert not tool.unchanged(rows, wanted)


def test_a_bad_row_is_seen():
    good = tool.Row("3.7.1", "sm_90", "x", "query", "bf16", 64, 64, 64, 4, 3, 255, 0, 100_000)
    assert good.wrong is None
    for change, why in (
        ({"spilled": 8}, "a thread spills 8 bytes"),
        ({"shared": 232_449}, "232449 bytes of shared memory of 232448"),
        ({"target": "sm_86", "shared": 101_377}, "shared memory"),
    ):
        row = tool.Row(**({f.name: getattr(good, f.name) for f in fields(good)} | change))
        assert why in row.wrong
    for change in ({"dtype": "fp32"}, {"head_size": 256}):  # recorded, not refused
        row = {f.name: getattr(good, f.name) for f in fields(good)} | {"spilled": 8} | change
        assert tool.Row(**row).wrong is None


def test_sources_are_printed():
    done = subprocess.run(
        [sys.executable, "tools/compile_kernels.py", "--source", "kerple_log"],
        cwd=ROOT,
        env=WITHOUT_INTERPRETER,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "def evaluate(s, di, dj, d, c):" in done.stdout
