"""Count by hand which batches a validation reads, and what is logged. No model is needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron.config import load_config
from megatron.data.tasks.registry import build_task
from megatron.engine.training.pipeline_engine import PipelineLosses
from megatron.evaluation import held_out
from megatron.evaluation.held_out import held_out_loss, log_final_losses, validation
from tests.helpers.jobs import write_config

KEYS = {"eval_interval": 3, "eval_iters": 5, "train_iters": 10, "eval_lengths": [64, 32]}
KEYS |= {"train_batch_size": 8, "gradient_accumulation_steps": 4, "eval_lengths_interval": 6}


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a function from config keys to data, an engine, and the calls that are made."""

    def build(text=None, losses=None, lacking=(), **keys):
        calls = []
        config = load_config([write_config(tmp_path / "c.yml", "text", **KEYS | keys)])

        def held(name, evaluations_before):
            calls.append((name, evaluations_before))
            return None if name in lacking else "loader"

        def loss_of_batches(engine, loader, count, groups, counting):
            calls.append((loader, count, counting))
            return 2.5

        def measured(config, groups, model, tokenizer, text, tokens):
            calls.append(("tokens", tokens))
            at = lambda length: SimpleNamespace(loss=length / 100)  # noqa: E731
            return SimpleNamespace(at_length=at), None

        monkeypatch.setattr(held_out, "loss_of_batches", loss_of_batches)
        monkeypatch.setattr(held_out, "measurement_of", measured)
        monkeypatch.setattr(held_out, "loss_function", lambda engine, groups: losses)
        data = SimpleNamespace(
            config=config, groups=None, tokenizer=None, text=text, counting="counting",
            held_out=held,
        )  # fmt: skip
        engine = SimpleNamespace(
            eval=lambda: calls.append("eval"), train=lambda: calls.append("train")
        )
        return data, engine, calls

    return build


LOSS = [("loader", 20, "counting")]  # 5 batches of 4 micro-batches


def test_a_validation_skips_the_batches_of_earlier_ones(job):
    data, engine, calls = job()
    assert validation(data, engine, 9) == {"validation/loss": 2.5}
    assert calls == [("valid", 2), *LOSS]
    data, engine, calls = job()
    validation(data, engine, 2)  # it is owed since a smaller `eval_interval`
    assert calls == [("valid", 0), *LOSS]
    assert validation(*job(lacking=["valid"])[:2], 9) == {}
    data, engine, calls = job(eval_iters=0)
    assert validation(data, engine, 9) == {} and calls == []


def test_lengths_are_measured_at_their_interval(job):
    """A validation reads 5 batches of 8 sequences of 16 tokens: 640 tokens."""
    data, engine, calls = job()
    assert validation(data, engine, 6) == {
        "validation/loss": 2.5, "validation/loss_at_32": 0.32, "validation/loss_at_64": 0.64
    }  # fmt: skip
    assert calls == [("valid", 1), *LOSS, "eval", ("tokens", 640), "train"]
    data, engine, calls = job(eval_iters=0)
    validation(data, engine, 6)
    assert calls == ["eval", ("tokens", 64), "train"]  # one sequence of the longest length


def test_a_length_task_has_accuracies_but_not_in_a_pipeline(job, monkeypatch):
    monkeypatch.setattr(
        held_out, "accuracy_at", lambda model, task, n, *sizes: SimpleNamespace(exact=1 / n)
    )
    task = build_task("copy", {"max_length": 4})
    data, engine, _ = job(task, eval_iters=0)
    found = {"validation/exact_at_32": 1 / 32, "validation/exact_at_64": 1 / 64}
    assert validation(data, engine, 6) == found
    data, engine, calls = job(task, object.__new__(PipelineLosses), eval_iters=0)
    assert validation(data, engine, 6) == {} and calls == ["eval", "train"]


def test_the_end_of_training_reads_what_no_validation_has_read(job):
    data, engine, calls = job()
    rows = []
    log = SimpleNamespace(metrics=lambda step, values, text: rows.append((step, values, text)))
    log_final_losses(data, engine, log, 10)
    assert calls == [("valid", 3), *LOSS, ("test", 0), *LOSS]
    assert rows == [
        (10, {f"final/{name}_loss": 2.5}, f"{name} loss after training: 2.5000")
        for name in ("valid", "test")
    ]
    assert held_out_loss(*job(lacking=["test"])[:2], "test", 0) is None
    rows.clear()
    log_final_losses(*job(lacking=["test", "valid"])[:2], log, 10)
    assert rows == []
