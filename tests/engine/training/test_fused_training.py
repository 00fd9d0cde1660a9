"""The fused passes under the training engine: launched as often as they should be, and right.

In Triton's interpreter, in a separate process; in fp32, because the interpreter is wrong in bf16.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs import digest, rewind, rows, write_config, write_shards
from tests.helpers.paths import ROOT

DRIVER = """
import json, sys
import train
sys.argv = ["train.py", *sys.argv[1:]]
code = train.main()
from megatron.kernels.launch import LAUNCHES
print("LAUNCHES", json.dumps(LAUNCHES))
sys.exit(code)
"""


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"))


def train(config: Path, *args: str, interpret: str = "1") -> tuple[int, str, dict[str, int]]:
    """(exit code, output, passes launched)."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(config), *args],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
        timeout=240,
    )
    launches = [line for line in done.stdout.splitlines() if line.startswith("LAUNCHES ")]
    counts = json.loads(launches[0].partition(" ")[2]) if launches else {}
    return done.returncode, done.stdout + done.stderr, counts


def keys(run: Path) -> dict:
    """Two layers of two heads; two micro-steps a step; validation after the second step."""
    return {
        "save": str(run),
        "load": str(run),
        "num_attention_heads": 2,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "train_iters": 2,
        "eval_interval": 2,
        "eval_iters": 1,
        "save_interval": 1,
    }


def test_training_launches_the_passes_and_learns_the_same(tmp_path, prefix):
    losses, launches = {}, {}
    for backend in ("fused", "blocked"):
        run = tmp_path / backend
        config = write_config(tmp_path / f"{backend}.yml", prefix, **keys(run))
        code, text, launches[backend] = train(config, "-o", f"attention_backend={backend}")
        assert code == 0, text
        assert f"attention: {backend} (as configured" in text
        losses[backend] = [*rows(run).values(), *rows(run, "valid/loss").values()]
    assert losses["fused"] == pytest.approx(losses["blocked"], abs=2e-5)
    passes = 2 * 2 * 2  # layers, micro-steps, steps
    forward = launches["fused"].pop("forward")
    assert launches == {"fused": {"query": passes, "key": passes}, "blocked": {}}
    evaluated = forward - passes  # two layers for each batch of validation
    assert evaluated > 0 and evaluated % 2 == 0


def test_dropout_is_repeated_on_resume(tmp_path, prefix):
    """A run that stops after its first step and goes on ends as if it had not stopped."""
    run = tmp_path / "run"
    config = write_config(tmp_path / "config.yml", prefix, **keys(run))
    options = ("-o", "attention_backend=fused", "-o", "attention_dropout=0.3")
    code, text, _ = train(config, *options)
    assert code == 0, text
    again = tmp_path / "again"
    rewind(run, again, 1)
    code, text, launches = train(config, *options, "-o", f"save={again}", "-o", f"load={again}")
    assert code == 0 and "resuming from" in text, text
    assert launches["query"] == 2 * 2
    assert digest(again) == digest(run) and rows(again) == rows(run)


def test_it_is_refused_at_start_where_it_cannot_run(tmp_path, prefix):
    config = write_config(tmp_path / "config.yml", prefix, **keys(tmp_path / "run"))
    for change, interpret, why in (
        ("precision=fp32", "0", "needs a CUDA GPU (or Triton's slow interpreter"),
        ("precision=bfloat16", "1", "wrong in bf16 in Triton's interpreter"),
    ):
        options = ("-o", "attention_backend=fused", "-o", change)
        code, text, launches = train(config, *options, interpret=interpret)
        assert code == 1 and why in text and "use auto, eager, blocked" in text, text
        assert not launches and "Traceback" not in text
