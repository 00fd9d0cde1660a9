"""What DeepSpeed is given: its configuration, its bucket, its groups, and an empty first step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils.config import get_timers_config
from torch import nn

from megatron.config import load_config
from megatron.engine.training import deepspeed_engine
from megatron.engine.training.deepspeed_engine import build_engine, engine_config, layout_of
from megatron.engine.training.schedule import AnnealingLR, Schedule
from megatron.numerics import WIDE, PublishedNumerics
from megatron.parallel.groups import TensorGroup, build_groups
from tests.helpers.jobs import write_config

CPU = build_groups(torch.device("cpu"))


@pytest.fixture
def settings(tmp_path):
    """Return a function from config keys to DeepSpeed's configuration on 3 replicas."""

    def build(**keys):
        keys = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4} | keys
        return engine_config(load_config([write_config(tmp_path / "c.yml", "text", **keys)]), 3)

    return build


def test_settings_that_no_key_changes(settings):
    found = settings()
    assert found["train_batch_size"] == 2 * 4 * 3
    assert found["train_micro_batch_size_per_gpu"] == 2
    assert found["gradient_accumulation_steps"] == 4
    assert found["zero_allow_untested_optimizer"] is True
    assert found["steps_per_print"] >= 10**6  # the log of this project has its own lines
    assert found["wall_clock_breakdown"] is False
    assert not get_timers_config(found).enabled  # it would wait for the GPU in each micro-batch
    assert found["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False}
    assert "data_types" not in found and "communication_data_type" not in found


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [({"fp32_allreduce": True}, "fp32"), ({"communication_data_type": "bf16"}, "bf16")],
)
def test_the_dtype_of_communication(settings, keys, dtype):
    assert settings(**keys)["communication_data_type"] == dtype


def test_the_dtype_of_sums_is_passed_on(settings):
    found = settings(data_types={"grad_accum_dtype": "fp32"}, bf16={"enabled": True})
    assert found["data_types"]["grad_accum_dtype"] == "fp32" and found["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("stage", "given", "recorded"), [(3, 5000, 5000), (3, 10**9, None), (2, 5000, None)]
)
def test_the_layout_records_a_size_of_sub_groups_that_is_not_the_default(
    tmp_path, stage, given, recorded
):
    keys = {"zero_optimization": {"stage": stage, "sub_group_size": given}}
    config = load_config([write_config(tmp_path / "c.yml", "text", train_batch_size=8, **keys)])
    assert layout_of(config, CPU)["sub_group_size"] == recorded


@pytest.fixture
def built(monkeypatch):
    """Return a function that builds an engine, and returns what DeepSpeed was given."""

    def build(zero, groups=CPU, optimizer_class=None, numerics=WIDE, numel=None):
        model = nn.Linear(4, 5)  # 25 parameters
        if numel:
            model.weight.ds_numel = numel
        optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
        optimizer.state[model.weight]["momentum"] = torch.ones(1)
        given = {}

        def initialize(**keys):
            given.update(keys, lr=optimizer.param_groups[0]["lr"])
            given["groups' mpu"] = deepspeed.utils.groups.mpu
            wrapped = optimizer
            if optimizer_class:
                wrapped = object.__new__(optimizer_class)
                wrapped.optimizer = optimizer
            return SimpleNamespace(optimizer=wrapped), None, None, None

        monkeypatch.setattr(deepspeed.utils.groups, "mpu", "the previous engine's")
        monkeypatch.setattr(deepspeed_engine.deepspeed, "initialize", initialize)
        schedule = AnnealingLR(optimizer, Schedule(0.5, 10))
        config = {"zero_optimization": zero, "other": 1}
        build_engine(model, optimizer, schedule, config, groups, numerics=numerics)
        assert optimizer.param_groups[0]["lr"] == 0.5 and config["zero_optimization"] == zero
        assert given["config"]["other"] == 1
        return given, optimizer.state

    return build


def test_the_first_step_is_empty_and_the_bucket_no_larger_than_the_model(built):
    given, state = built({"stage": 1})
    assert given["lr"] == 0.0 and state
    assert given["config"]["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 25}
    assert given["mpu"] is None and given["groups' mpu"] is None
    given, _ = built({"stage": 1, "reduce_bucket_size": 7})
    assert given["config"]["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 7}


def test_the_default_bucket_is_deepspeeds(built):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    given, _ = built({"stage": 3}, numel=10**12)
    default = DeepSpeedZeroConfig().reduce_bucket_size
    assert given["config"]["zero_optimization"]["reduce_bucket_size"] == default


@pytest.mark.parametrize(
    ("model", "stages", "needed"), [(1, 1, False), (2, 1, True), (2, 2, False), (1, 2, False)]
)
def test_only_tensor_parallel_ranks_of_one_stage_need_an_mpu(built, model, stages, needed):
    groups = replace(CPU, model=TensorGroup(size=model), pipe_size=stages)
    given, _ = built({"stage": 1}, groups)
    assert (given["mpu"] is not None) == needed and given["groups' mpu"] is given["mpu"]


@pytest.mark.parametrize(
    ("kind", "numerics", "kept"),
    [
        (FP16_UnfusedOptimizer, WIDE, False),
        (FP16_UnfusedOptimizer, PublishedNumerics(torch.bfloat16), True),
        (None, WIDE, True),
    ],
)
def test_the_empty_step_does_not_count_in_adams_state(built, kind, numerics, kept):
    assert bool(built({"stage": 0}, CPU, kind, numerics)[1]) == kept
