"""Test training with the key `torch_compile`, with backends that need no C++ compiler."""

from __future__ import annotations

from functools import partialmethod
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from megatron.config import ConfigError, load_config
from megatron.engine.training import loop
from megatron.engine.training.compiled import Compilations, compile_model
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
    for name, ranks_of_a_sequence in (("plain", 1), ("compiled", 1), ("context", 2)):
        compiled = name != "plain"
        config, run = write_run_config(
            tmp_path / name, prefix, torch_compile=compiled, train_batch_size=4,
            context_parallel_size=ranks_of_a_sequence,
            zero_optimization={"stage": 1}, eval_lengths=[16, 32, 64], eval_tokens=128,
        )  # fmt: skip
        graphs = run_ranks(2, compiled_job, config)
        assert graphs == [(int(compiled), {})] * 2
        found.append(rows(run))
        assert set(rows(run, "compile/graphs").values()) == ({1} if compiled else set())
        assert set(rows(run, "compile/recompiles").values()) == ({0} if compiled else set())
    assert len(found[0]) > 1 and found[1:] == [pytest.approx(found[0], rel=1e-5)] * 2


@pytest.mark.parametrize(
    ("mode", "copied"),
    [("default", False), ("reduce-overhead", True), ("max-autotune-no-cudagraphs", False)],
)
def test_gradients_are_copied_only_with_cuda_graphs(monkeypatch, mode, copied):
    """A hook that clones gets a gradient of its own, so the parameter's is another tensor."""
    compiled, hooked = [], []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **how: compiled.append(how))
    monkeypatch.setattr(nn.Parameter, "register_hook", lambda *given: hooked.append(given))
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    compile_model(model, mode)
    assert compiled == [{"dynamic": False, "mode": mode}]
    assert [(id(weight), hook) for weight, hook in hooked] == (
        [(id(model.weight), torch.clone)] * copied
    )


def recorded(graph, _):
    """Compile to a function whose results are in the same memory each time, as a CUDA graph's."""
    kept = []

    def run(*inputs):
        results = graph(*inputs)
        kept[:] = kept or [None if x is None else x.clone() for x in results]
        for own, new in zip(kept, results, strict=True):
            if new is not None:
                own.copy_(new)
        return [None if x is None else x.detach() for x in kept]

    return run


def jobs_with_graphs(groups, configs):
    """Run jobs whose backward pass gives gradients in memory that its next run overwrites."""
    modes = []
    backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=recorded)

    def compile_model(self, dynamic, mode):
        modes.append(mode)
        nn.Module.compile(self, dynamic=dynamic, backend=backend)

    with mock.patch.object(GPT, "compile", compile_model):
        for config in configs:
            torch._dynamo.reset()
            run_job(groups, config)
    return modes


def test_with_cuda_graphs_gradients_outlive_the_next_micro_batch(tmp_path):
    prefix, configs, runs = write_shards(tmp_path), [], []
    graphs = {"torch_compile": True, "torch_compile_mode": "reduce-overhead"}
    for stage, keys in ((0, {}), (0, graphs), (1, graphs), (2, graphs)):
        config, run = write_run_config(
            tmp_path / str(len(runs)), prefix, **keys, train_iters=3, eval_iters=0,
            gradient_accumulation_steps=3, train_micro_batch_size_per_gpu=1,
            zero_optimization={"stage": stage},
        )  # fmt: skip
        configs.append(config)
        runs.append(run)
    (modes,) = run_ranks(1, jobs_with_graphs, configs)
    assert modes == ["reduce-overhead"] * 3
    eager, *found = map(rows, runs)
    assert len(eager) == 3 and found == [pytest.approx(eager, rel=1e-5)] * 3


def job_that_compiles_again(groups, config):
    """Run a job in which something changes before step 3 that graphs depend on."""
    before, calls = loop.train_step, []

    def step(*args):
        calls.append(args)
        torch.backends.cuda.matmul.allow_tf32 = len(calls) == 3
        return before(*args)

    with (
        mock.patch.object(GPT, "compile", partialmethod(nn.Module.compile, backend="eager")),
        mock.patch.object(loop, "train_step", step),
    ):
        run_job(groups, config)


def test_a_graph_that_is_made_later_is_counted(tmp_path):
    config, run = write_run_config(
        tmp_path, write_shards(tmp_path), torch_compile=True, train_micro_batch_size_per_gpu=1,
        train_iters=4, eval_iters=0,
    )  # fmt: skip
    run_ranks(1, job_that_compiles_again, config)
    assert list(rows(run, "compile/graphs").values()) == [1, 1, 2, 2]
    assert list(rows(run, "compile/recompiles").values()) == [0, 0, 1, 1]


def test_nothing_is_counted_if_the_model_is_not_compiled():
    compilations = Compilations(asked=False)
    assert compilations.metrics() == {}


@pytest.mark.parametrize("layout", ["model_parallel_size=2", "zero_optimization.stage=3"])
def test_it_is_refused_where_it_does_not_work(tmp_path, layout):
    config, _ = write_run_config(tmp_path, write_shards(tmp_path), torch_compile=True)
    with pytest.raises(ConfigError, match="torch_compile.*not supported"):
        load_config([config], world_size=2, overrides=[layout])


def test_cuda_graphs_are_refused_with_context_parallelism(tmp_path):
    config, _ = write_run_config(
        tmp_path, "x", torch_compile=True, train_micro_batch_size_per_gpu=1, context_parallel_size=2
    )
    assert load_config([config], world_size=2).training.torch_compile_mode == "default"
    with pytest.raises(ConfigError, match="reduce-overhead with context_parallel_size 2.*default"):
        load_config([config], world_size=2, overrides=["torch_compile_mode=reduce-overhead"])
