"""Test training with the fused Triton kernels: the number of launches, and the results.

In Triton's interpreter, in a separate process; in fp32, because the interpreter is wrong in bf16.
"""

from __future__ import annotations

import pytest

from tests.helpers.fused_training import keys, train
from tests.helpers.jobs import digest, rewind, rows, write_config


def test_training_launches_the_passes_and_learns_as_eager(tmp_path, prefix):
    losses, launches, steps = {}, {}, 20
    for backend in ("fused", "eager"):
        run = tmp_path / backend
        changes = {"gradient_accumulation_steps": 1, "num_attention_heads": 1, "hidden_size": 16}
        changes |= {"train_iters": steps, "eval_interval": steps, "save_interval": steps}
        config = write_config(tmp_path / f"{backend}.yml", prefix, **keys(run) | changes)
        code, text, launches[backend] = train(config, "-o", f"attention_backend={backend}")
        assert code == 0, text
        assert f"attention: {backend} (as configured" in text
        losses[backend] = [*rows(run).values(), *rows(run, "validation/loss").values()]
    assert losses["fused"] == pytest.approx(losses["eager"], abs=1e-4)
    assert len(losses["fused"]) == steps + 1 and losses["fused"][-2] < losses["fused"][0] - 0.1
    passes = 2 * steps  # layers, steps
    forward = launches["fused"].pop("forward")
    assert launches == {"fused": {"query": passes, "key": passes}, "eager": {}}
    evaluated = forward - passes  # two layers for each batch of validation
    assert evaluated > 0 and evaluated % 2 == 0


def test_dropout_is_repeated_on_resume(tmp_path, prefix):
    """A run that stops after its first step and is resumed ends like an uninterrupted run."""
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
