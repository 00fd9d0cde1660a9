"""Test the profiles of a run: torch's trace and table, memory, and DeepSpeed's breakdown."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch

from megatron.config.sections.data import LoggingConfig
from megatron.engine.training.profiler import StepProfiler
from tests.helpers.jobs import digest, train_run, write_shards
from tests.helpers.launch import run_ranks

KEYS = {"profile": True, "profile_step_start": 2, "profile_step_stop": 3, "train_iters": 4}
FLOPS = {"enabled": True, "profile_step": 1, "module_depth": 2}


def train(groups, folder):
    prefix = write_shards(folder) if groups.is_main else str(folder / "text_document")
    groups.barrier()
    batch = {"train_micro_batch_size_per_gpu": 4, "num_layers": 1}
    flops = {"flops_profiler": FLOPS | {"output_file": str(folder / "flops.txt")}}
    train_run(groups, folder / "plain", prefix, batch | {"train_iters": 4})
    train_run(groups, folder / "profiled", prefix, batch | KEYS | flops)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    run_ranks(2, train, folder)
    return folder


def test_a_trace_and_a_table_of_the_asked_steps(folder):
    run = folder / "profiled"
    assert {path.name for path in run.glob("*profile*")} == {
        "profile_step2-3.json", "profile_step2-3.txt"
    }  # fmt: skip
    events = json.loads((run / "profile_step2-3.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    # ZeRO takes the step of each of the two parameter groups by itself.
    assert sum(name.startswith("Optimizer.step#") for name in names) == 2 * 2
    assert "aten::native_layer_norm" in names
    table = (run / "profile_step2-3.txt").read_text()
    shares = [float(each) for each in re.findall(r"^ +\S+ +([\d.]+)%", table, re.M)]
    assert "Self CPU" in table and len(shares) > 5 and shares == sorted(shares, reverse=True)


def test_deepspeed_prints_its_breakdown(folder):
    text = (folder / "flops.txt").read_text()
    assert "DeepSpeed Flops Profiler" in text and "Profile Summary at step 2" in text
    assert re.search(r"fwd MACs per GPU: +[\d.]+ [KM]MACs", text)


def test_profiles_change_no_weight(folder):
    assert digest(folder / "profiled") == digest(folder / "plain")


def profiler(tmp_path, said, **changes):
    keys = {"profile": False, "memory_profiling": True, "memory_profiling_path": None}
    keys |= {"profile_step_start": 2, "profile_step_stop": 2} | changes
    log = SimpleNamespace(is_main=True, line=said.append)
    return StepProfiler(LoggingConfig(**keys), tmp_path, log)


def test_training_that_ends_before_the_profile_does_writes_it(tmp_path):
    said = []
    steps = profiler(tmp_path, said, profile=True, memory_profiling=False, profile_step_stop=9)
    for number in (1, 2, 3):
        steps.before_step(number)
        torch.ones(2) + 1
    steps.end()
    steps.end()
    assert {path.name for path in tmp_path.iterdir()} == {
        "profile_step2-3.json", "profile_step2-3.txt"
    }  # fmt: skip
    assert len(said) == 1 and "aten::add" in (tmp_path / "profile_step2-3.txt").read_text()
    events = json.loads((tmp_path / "profile_step2-3.json").read_text())["traceEvents"]
    shapes = [e["args"].get("Input Dims") for e in events if e.get("name") == "aten::add"]
    assert shapes == [[[2], [], []]] * 2  # steps 2 and 3: a tensor of 2 elements, 1, and alpha


def test_a_profile_from_step_0_begins_with_the_first_step(tmp_path):
    """As in gpt-neox, whose counter stands at 0 before the first step."""
    keys = {"profile_step_start": 0, "profile_step_stop": 1}
    steps = profiler(tmp_path, [], profile=True, memory_profiling=False, **keys)
    for number, found in ((1, 0), (2, 2)):
        steps.before_step(number)
        assert len(list(tmp_path.glob("profile_step1-1.*"))) == found
        torch.ones(2) + 1
    assert "aten::add" in (tmp_path / "profile_step1-1.txt").read_text()


def test_a_run_that_goes_on_after_the_first_step_says_that_nothing_is_profiled(tmp_path):
    said = []
    steps = profiler(tmp_path, said, profile=True, memory_profiling=False, profile_step_stop=9)
    for number in (5, 6):
        steps.before_step(number)
    steps.end()
    assert len(said) == 1 and "begins at step 5, after profile_step_start: 2" in said[0]
    assert not list(tmp_path.iterdir())
    (tmp_path / "profile_step2-9.txt").touch()  # of the run, before it was stopped
    profiler(tmp_path, said, profile=True, memory_profiling=False).before_step(5)
    assert len(said) == 1


def test_memory_of_a_gpu_is_recorded(tmp_path, monkeypatch):
    said, calls = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    record, dump = "torch.cuda.memory._record_memory_history", "torch.cuda.memory._dump_snapshot"
    monkeypatch.setattr(record, lambda **options: calls.append(options))
    monkeypatch.setattr(dump, lambda path: open(path, "w").close())
    steps = profiler(tmp_path, said, memory_profiling_path=str(tmp_path / "there"))
    told = ([], [{}], [{}, {"enabled": None}], [{}, {"enabled": None}])
    for number, expected in enumerate(told, 1):
        steps.before_step(number)
        assert calls == expected
    steps.end()
    early = profiler(tmp_path, [])
    early.before_step(1), early.end()  # training ends before the first step of the profile
    assert calls == told[-1]
    path = tmp_path / "there" / "profile_step2-2_memory.pickle"
    assert path.exists() and len(said) == 1 and str(path) in said[0]


def test_memory_without_a_gpu_is_said(tmp_path):
    said = []
    steps = profiler(tmp_path, said)
    steps.before_step(1), steps.before_step(2), steps.end()
    assert "there is no GPU" in said[0] and not list(tmp_path.iterdir())
