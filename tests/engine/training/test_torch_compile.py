"""Test training with the key `torch_compile`, with a backend that needs no C++ compiler."""

from __future__ import annotations

from functools import partialmethod
from unittest import mock

import pytest
from torch import nn
from torch._dynamo.utils import counters

from megatron.config import ConfigError, load_config
from megatron.model import GPT
from tests.helpers.jobs import rows, run_job, write_run_config, write_shards
from tests.helpers.launch import run_ranks


def compiled_job(groups, config):
    with mock.patch.object(GPT, "compile", partialmethod(nn.Module.compile, backend="aot_eager")):
        run_job(groups, config)
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def test_one_graph_trains_to_the_same_loss_and_evaluation_compiles_nothing(tmp_path):
    prefix = write_shards(tmp_path)
    found = []
    for name, compiled in (("plain", False), ("compiled", True)):
        config, run = write_run_config(
            tmp_path / name, prefix, torch_compile=compiled, train_micro_batch_size_per_gpu=2,
            zero_optimization={"stage": 1}, eval_lengths=[16, 32, 64], eval_tokens=128,
        )  # fmt: skip
        graphs = run_ranks(2, compiled_job, config)
        assert graphs == [(int(compiled), {})] * 2
        found.append(rows(run))
    assert len(found[0]) > 1 and found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("layout", ["model_parallel_size=2", "zero_optimization.stage=3"])
def test_it_is_refused_where_it_does_not_work(tmp_path, layout):
    config, _ = write_run_config(tmp_path, write_shards(tmp_path), torch_compile=True)
    with pytest.raises(ConfigError, match="torch_compile.*not supported"):
        load_config([config], world_size=2, overrides=[layout])
