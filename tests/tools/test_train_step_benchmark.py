"""Test that the benchmark of a training step runs, and counts as the training log does."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.train_step import arguments, flops_per_token, main, markdown
from megatron.engine.training import speed
from megatron.model import BlockShape, GPTShape
from tests.helpers.launch import call

TINY = "--layers 1 --width 16 --heads 1 --length 8 --batch 1 --vocab 32 --rounds 1 --steps 1"


def test_a_tiny_run_without_deepspeed(tmp_path):
    names = ["project, plain loop", "plain", "plain, our settings"]
    call("benchmarks/train_step.py", *TINY.split(), "--threads", 1, "--out", tmp_path,
         "--only", *names)  # fmt: skip
    report = json.loads((tmp_path / "train_step.json").read_text())
    assert [row["variant"] for row in report["rows"]] == names
    for row in report["rows"]:
        assert row["tokens_per_second"] > 0 and row["peak_mb"] > 0 and row["cpu_ms"] > 0
        assert sum(row["parts"].values()) == pytest.approx(1)
        assert row["parts"]["products"] > 0 and row["parts"]["optimizer"] > 0
        assert row["waiting"]
    assert (tmp_path / "train_step.md").read_text() == markdown(report)
    assert (tmp_path / "train_step.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_variant_replaces_no_report(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(tmp_path / "out"), "--only", "plan"])
    with pytest.raises(SystemExit, match="--only: plan cannot be measured here; known: .*plain"):
        main()
    assert not (tmp_path / "out").exists()


def test_it_counts_operations_as_the_log_does():
    args = arguments().parse_args(["--out", "x", "--layers", "3", "--vocab", "640"])
    shape = GPTShape(3, 640, BlockShape(args.width, args.heads), args.length)
    assert flops_per_token(args) == speed.flops_per_token(shape, args.length)
