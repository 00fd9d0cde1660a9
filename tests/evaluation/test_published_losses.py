"""The losses that GPT-NeoX prints: how many batches they read, and what the lines say."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from megatron.engine.training.batches import Counting
from megatron.evaluation import held_out
from megatron.evaluation.held_out import log_published_losses


@pytest.fixture
def logged(monkeypatch):
    """Return a function from the batches that are left to the lines, rows and calls."""

    def log(left):
        lines, calls = [], []
        config = SimpleNamespace(
            training=SimpleNamespace(eval_iters=3),
            batch=SimpleNamespace(gradient_accumulation_steps=2),
            model=SimpleNamespace(seq_length_val=64),
        )

        def held_out_at(name, iteration):
            assert iteration == 70
            if left[name] is None:
                return None
            return SimpleNamespace(
                batches_left=left[name], consumed_samples=40, micro_batch=4, dp_size=2
            )

        def loss_of_batches(engine, loader, count, groups, counting):
            calls.append((count, counting))
            return 2.0

        monkeypatch.setattr(held_out, "loss_of_batches", loss_of_batches)
        counting = Counting(5, per_token=True)
        data = SimpleNamespace(
            config=config, held_out_at=held_out_at, groups=None, counting=counting
        )
        log = SimpleNamespace(
            line=lines.append, metrics=lambda step, values, text: lines.append((step, values, text))
        )
        log_published_losses(data, None, log, 70)
        return lines, calls

    return log


def test_six_batches_of_eight_sequences(logged):
    lines, calls = logged({"valid": 6, "test": 4})
    assert calls == [(6, Counting(5)), (4, Counting(5))]  # the mean of micro-batches, as published
    ppl = math.exp(2.0)
    assert lines[0] == (
        70,
        {"final/valid_loss": 2.0, "final/valid_ppl": pytest.approx(ppl)},
        "valid loss at iteration 70: 2.000000 | perplexity 7.3891 | 48 sequences of 64 tokens, "
        "from sample 40 on",
    )
    assert lines[1][2].endswith(
        "| 32 sequences of 64 tokens, from sample 40 on, all that are left of 6 batches"
    )


def test_a_split_without_batches_is_told(logged):
    lines, calls = logged({"valid": None, "test": 0})
    assert calls == []
    assert lines == [f"{name}: the split holds no batch to evaluate" for name in ("valid", "test")]
