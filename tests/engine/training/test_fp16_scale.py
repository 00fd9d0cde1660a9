"""Test the loss scale of fp16, from the config's keys to the engine's scaler, without a GPU.

The engine refuses fp16 on a CPU: fp16 jobs are in tests/gpu/test_gpu_engine.py.
"""

import os
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScaleConfig
from deepspeed.runtime.precision_config import get_float16_config

from megatron.config import load_config
from megatron.engine.errors import DivergedError
from megatron.engine.job import join
from megatron.engine.training import loop
from megatron.engine.training.deepspeed_engine import engine_config
from megatron.engine.training.optimizer import keep_hyperparameters
from megatron.parallel.groups import build_groups

BASE = """
num_layers: 1
hidden_size: 8
num_attention_heads: 1
seq_length: 8
train_iters: 1
train_micro_batch_size_per_gpu: 1
optimizer: {type: Adam, params: {lr: 0.1}}
"""


@pytest.fixture(scope="module")
def job():
    """Join a job, because the scaler asks for its rank when a step overflows."""
    join.join_job()
    yield
    join.leave_job()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)


@pytest.fixture
def scaler(job, tmp_path):
    """Return a function that builds the engine's scaler from the config's `fp16` section."""

    def build(fp16):
        path = tmp_path / "config.yml"
        path.write_text(f"{BASE}\nfp16: {fp16}\n")
        written = engine_config(load_config([path]), replicas=1)
        read = get_float16_config(written)
        assert read.enabled
        dynamic = read.loss_scale == 0
        args = read.dynamic_loss_scale_args()
        return CreateLossScaler(torch.half, read.loss_scale, dynamic, args)

    return build


def scales(scaler, overflows):
    found = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        found.append(scaler.loss_scale)
    return found


def test_it_halves_after_overflows_and_doubles_after_a_quiet_window(scaler):
    dynamic = scaler(
        "{enabled: true, initial_scale_power: 4, loss_scale_window: 2, hysteresis: 1, "
        "min_loss_scale: 2}"
    )
    assert dynamic.loss_scale == 16
    assert scales(dynamic, [True, True, True]) == [8, 4, 2]
    assert scales(dynamic, [False, False, False, False]) == [2, 2, 4, 4]
    assert scales(dynamic, [True]) == [2]
    with pytest.raises(Exception, match="already at minimum"):
        scales(dynamic, [True])


def test_hysteresis_lets_single_overflows_pass(scaler):
    patient = scaler("{enabled: true, initial_scale_power: 4, hysteresis: 3}")
    assert scales(patient, [True, True, True, True]) == [16, 16, 8, 4]


def test_a_fixed_scale_stays(scaler):
    fixed = scaler("{enabled: true, loss_scale: 128}")
    assert scales(fixed, [True, False, True]) == [128, 128, 128]


def test_a_loaded_scale_goes_on_with_this_runs_settings(scaler):
    def loaded_into(mine, loaded):
        engine = SimpleNamespace(clip_grad=1.0, dynamic_loss_scale=mine.dynamic, loss_scaler=mine)
        nothing = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[]), write=lambda: None)
        with keep_hyperparameters(nothing, engine):
            vars(engine).update(
                clip_grad=0.0, dynamic_loss_scale=loaded.dynamic, loss_scaler=loaded
            )
        assert engine.clip_grad == 1 and engine.dynamic_loss_scale is mine.dynamic
        return engine.loss_scaler

    loaded = scaler("{enabled: true, initial_scale_power: 4, min_loss_scale: 8, hysteresis: 1}")
    assert scales(loaded, [False, True]) == [16, 8]
    fixed = scaler("{enabled: true, loss_scale: 128}")
    mine = scaler("{enabled: true, initial_scale_power: 9, loss_scale_window: 3, hysteresis: 1}")
    found = loaded_into(mine, loaded)
    assert (found.min_scale, found.scale_window, found.cur_iter) == (1, 3, 2)
    assert scales(found, [True, False, False, False, False]) == [4, 4, 4, 4, 8]
    assert scales(loaded_into(fixed, loaded), [True]) == [128]
    assert loaded_into(mine, fixed).loss_scale == 2**9
    higher = scaler("{enabled: true, min_loss_scale: 64}")
    assert loaded_into(higher, loaded).loss_scale == 64
    plain, other = PlainOptimizer(mine), PlainOptimizer(loaded)
    other.step(True)
    nothing = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[]), write=lambda: None)
    with keep_hyperparameters(nothing, plain):
        vars(plain.loss_scale_config).update(vars(other.loss_scale_config))
    kept = plain.loss_scale_config
    assert (kept.scale_window, kept.min_loss_scale, kept.cur_scale) == (3, 1, 8)


class ZeroOptimizer:
    """A fake ZeRO optimizer of DeepSpeed, with the methods that use the loss scale."""

    param_groups = ({"lr": 0.1},)

    def __init__(self, scaler):
        self.scaler = scaler

    @property
    def loss_scale(self):
        return self.scaler.loss_scale

    def step(self, overflow):
        self.scaler.update_scale(overflow)


class PlainOptimizer(FP16_Optimizer):
    """DeepSpeed's optimizer for stage 0, without weights."""

    param_groups = ZeroOptimizer.param_groups

    def __init__(self, scaler):
        self.verbose = self.custom_loss_scaler = self.overflow = False
        dynamic = {"init_scale": scaler.cur_scale, "min_scale": scaler.min_scale}
        dynamic |= {"scale_window": scaler.scale_window}
        self.loss_scale_config = LossScaleConfig(torch.half, True, 0, dynamic)

    def step(self, overflow):
        self.overflow = overflow
        self._update_scale(overflow)


def run_loop(engine, tmp_path):
    path = tmp_path / "loop.yml"
    path.write_text(f"{BASE}\nfp16: {{enabled: true}}\n")
    config = load_config([path], ["train_iters=5", "log_interval=9", "eval_interval=9"])
    theta = SimpleNamespace(project=lambda: None)
    log, groups = SimpleNamespace(progress=lambda *_: None), build_groups(torch.device("cpu"))
    batches = SimpleNamespace(consumed_samples=0)
    training = loop.TrainingLoop(config, engine, groups, theta, log, hooks=[], state={})
    training.run(batches, 0)


@pytest.mark.parametrize("kind", [ZeroOptimizer, PlainOptimizer])
def test_an_overflow_at_the_least_scale_says_what_to_set(scaler, tmp_path, monkeypatch, kind):
    """Steps 1 and 2 lower the scale to the least one, step 3 fits, and step 4 overflows."""
    least = scaler("{enabled: true, initial_scale_power: 3, hysteresis: 1, min_loss_scale: 2}")
    engine = SimpleNamespace(optimizer=kind(least), train=lambda: None, get_lr=lambda: [0.1])
    overflows = [True, True, False, True, False]
    done = []

    def step(engine, batches, accumulation, groups, hooks, uncounted_after):
        done.append(overflows[len(done)])
        engine.optimizer.step(done[-1])
        return torch.zeros(()), 1.0

    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(DivergedError) as error:
        run_loop(engine, tmp_path)
    text = str(error.value)
    assert len(done) == 4
    assert "overflow at step 4 even at the least loss scale, 2, " in text
    for way in ("learning rate", "lower min_loss_scale", "bf16: {enabled: true}"):
        assert way in text
    assert error.value.__cause__ is None


def test_other_errors_of_a_step_pass_as_they_are(tmp_path, monkeypatch):
    def step(engine, batches, accumulation, groups, hooks, uncounted_after):
        raise ValueError("another matter")

    engine = SimpleNamespace(
        optimizer=ZeroOptimizer(None), train=lambda: None, get_lr=lambda: [0.1]
    )
    monkeypatch.setattr(loop, "train_step", step)
    with pytest.raises(ValueError, match="^another matter$"):
        run_loop(engine, tmp_path)
