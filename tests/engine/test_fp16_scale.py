"""The loss scale of fp16, from the config's keys to what the engine's scaler does; no GPU needed.

The engine refuses fp16 on a CPU: whole fp16 jobs are in tests/gpu/test_gpu_engine.py.
"""

import os

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.precision_config import get_float16_config

from megatron.config import load_config
from megatron.engine import distributed
from megatron.engine.job_engine import FP16_OPTIONS
from megatron.engine.optim import engine_config

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
    """The scaler asks for its rank when a step overflows."""
    distributed.start()
    yield
    distributed.stop()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)


@pytest.fixture
def scaler(job, tmp_path):
    """What the engine would build from the config's `fp16` section."""

    def build(fp16):
        path = tmp_path / "config.yml"
        path.write_text(f"{BASE}\nfp16: {fp16}\n")
        training = load_config([path]).training
        written = engine_config(
            micro_batch=1,
            accumulation=1,
            world_size=1,
            precision=training.precision,
            gradient_clipping=1.0,
            zero_stage=1,
            zero_options={},
            fp16_options={key: getattr(training, key) for key in FP16_OPTIONS},
        )
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
