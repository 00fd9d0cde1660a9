"""Test training with the fused Triton kernels on a GPU: 16-bit precisions, resuming.

Whole jobs by `train.py` in processes of their own.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

NEEDED = "needs requirements.txt (deepspeed, pydantic, tokenizers, ...): it trains with the engine"
for _package in ("deepspeed", "pydantic", "yaml"):
    pytest.importorskip(_package, reason=NEEDED)

from tests.helpers.fused_training import keys  # noqa: E402
from tests.helpers.fused_training import train as train_in  # noqa: E402
from tests.helpers.jobs import digest, rewind, rows, write_config, write_shards  # noqa: E402

INTERPRET = "0"
PRECISIONS = ("bfloat16", "fp16", "fp32")
STEPS = 4


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"))


def job(folder, prefix, **changes):
    """Return (config file, run folder) of a job of a few steps, with a checkpoint after each."""
    run = folder / "run"
    values = keys(run) | {"train_iters": STEPS, "eval_interval": STEPS} | changes
    return write_config(folder / "config.yml", prefix, **values), run


def train(config, *options) -> dict[str, int]:
    """Run a job to its end, and return how often each Triton kernel was launched."""
    options = [part for option in options for part in ("-o", option)]
    code, text, launches = train_in(config, *options, interpret=INTERPRET)
    assert code == 0, text
    return launches


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fused_learns_what_eager_learns(tmp_path, prefix, precision):
    losses, launches = {}, {}
    for backend in ("fused", "eager"):
        config, run = job(tmp_path / backend, prefix)
        options = (f"attention_backend={backend}", f"precision={precision}")
        launches[backend] = train(config, *options)
        losses[backend] = [*rows(run).values(), *rows(run, "validation/loss").values()]
    assert len(losses["fused"]) == STEPS + 1
    tolerance = 1e-4 if precision == "fp32" else 0.05
    assert losses["fused"] == pytest.approx(losses["eager"], abs=tolerance)
    passes = 2 * 2 * STEPS  # layers, micro-steps, steps
    assert launches["fused"]["query"] == launches["fused"]["key"] == passes
    assert launches["fused"]["forward"] > passes and not launches["eager"]


def test_fp16_steps_that_overflow_are_left_out(tmp_path, prefix):
    """The first loss scale is far too large. Steps are skipped until it fits; then loss falls."""
    scaling = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    config, run = job(tmp_path, prefix, fp16=scaling, train_iters=24, save_interval=24)
    train(config, "attention_backend=fused")
    state = torch.load(run / "global_step24" / "mp_rank_00_model_states.pt", weights_only=False)
    assert 1 <= state["skipped_steps"] <= 16
    losses = list(rows(run).values())
    assert losses[0] == pytest.approx(losses[1], abs=0.3)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_training_is_repeatable_and_resumes_bit_for_bit(tmp_path, prefix, precision):
    options = ("attention_backend=fused", "attention_dropout=0.1", f"precision={precision}")
    config, run = job(tmp_path / "one", prefix)
    train(config, *options)
    other_config, other = job(tmp_path / "other", prefix)
    train(other_config, *options)
    assert digest(run) == digest(other) and rows(run) == rows(other)
    again = tmp_path / "again"
    rewind(run, again, 2)
    launches = train(config, *options, f"save={again}", f"load={again}")
    assert launches["query"] == 2 * 2 * 2
    assert digest(again) == digest(run) and rows(again) == rows(run)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_cuda_graphs_train_to_the_same_losses(tmp_path, prefix, stage):
    """In a step of two micro-batches, the second run of a graph overwrites the first gradients."""
    losses = {}
    for mode in ("default", "reduce-overhead"):
        changes = {"torch_compile": True, "torch_compile_mode": mode, "train_iters": 20}
        config, run = job(tmp_path / mode, prefix, **changes, zero_optimization={"stage": stage})
        train(config, "attention_backend=fused", "precision=fp32")
        losses[mode] = rows(run)
        assert set(rows(run, "compile/graphs").values()) == {1}
        assert set(rows(run, "compile/cudagraph_skips").values()) == {0}
    assert len(losses["default"]) == 20
    assert losses["reduce-overhead"] == pytest.approx(losses["default"], rel=1e-5)
