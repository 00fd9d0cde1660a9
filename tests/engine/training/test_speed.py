"""Each rate that training logs, against a count by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from megatron.config import load_config
from megatron.engine.job_data import JobData
from megatron.engine.model_shape import shape_of
from megatron.engine.training import step_log
from megatron.engine.training.hooks import Step
from megatron.engine.training.speed import (
    Speed,
    flops_per_token,
    keys_per_query,
    known_peak,
    mean_keys,
    speed_of,
)
from megatron.engine.training.step_log import StepLog
from megatron.parallel.groups import build_groups
from tests.helpers.jobs import write_config, write_shards
from tests.helpers.shards import write_documents

CPU = build_groups(torch.device("cpu"))
LONG = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 8192}


@pytest.fixture
def config(tmp_path):
    """Return a function from changed keys to a config."""

    def read(prefix="text", **changes):
        keys = {"train_batch_size": 8} | changes
        return load_config([write_config(tmp_path / "c.yml", prefix, **keys)])

    return read


def keys_by_hand(length, window, documents):
    """Count the keys of each query of the text pair by pair, without the causal mask.

    A query with a window sees `window` earlier keys and itself, as far as its document reaches.
    """
    owner = np.repeat(np.arange(len(documents)), documents)
    counts = []
    for start in range(0, len(owner), length):
        part = owner[start : start + length]
        counts += [
            min((part == own).sum(), math.inf if window is None else window + 1) for own in part
        ]
    return sum(counts) / len(counts)


@pytest.mark.parametrize("window", [None, 3, 7, 100])
@pytest.mark.parametrize("documents", [[60], [5, 9, 2, 30, 14], [16, 16, 16], [1] * 40])
def test_the_keys_of_windows_and_documents(config, window, documents):
    changes = {"reset_attention_mask": True, "sliding_window_width": window}
    found = keys_per_query(config(**changes), [(np.array(documents, np.int32), 1.0)])
    assert found == pytest.approx(keys_by_hand(16, window, documents))


def test_layers_and_corpora_are_weighted(config):
    layers = config(sliding_window_width=[[[3, "none"], 1]])
    assert keys_per_query(layers) == (4 + 16) / 2
    both = [(np.array([8, 8, 8]), 3.0), (np.array([64]), 1.0)]
    assert keys_per_query(config(reset_attention_mask=True), both) == (3 * 8 + 16) / 4
    assert keys_per_query(config(), both) == 16  # documents do not limit what tokens see


def test_a_curriculum_has_the_mean_of_its_steps(config):
    """3 steps see 4 keys and 6 steps 16; the run ends before the stage of 8 that comes last."""
    stages = [[0, 4], [3, 16], [20, 8], [30, 16]]
    assert mean_keys(config(curriculum=stages, train_iters=9)) == (3 * 4 + 6 * 16) / 9
    assert mean_keys(config(curriculum=stages, train_iters=0)) == 4
    assert mean_keys(config(train_iters=9)) == 16


def test_a_window_of_128_in_8192_tokens(config):
    """24 layers of width 1024: 12 h^2 weights each, and a table of 384 rows."""
    full, near = (config(**LONG, **more) for more in ({}, {"sliding_window_width": 128}))
    found = [flops_per_token(shape_of(c, 384), keys_per_query(c)) for c in (full, near)]
    weights = 6 * (24 * 12 * 1024**2 + 384 * 1024)
    assert found == [weights + 12 * 24 * 1024 * keys for keys in (8192, 129)]
    assert found[0] / found[1] > 2.2


def test_an_output_gate_is_one_more_matrix_in_each_layer(config):
    found = [
        flops_per_token(shape_of(c, 384), 8)
        for c in (config(num_layers=3, attention_output_gate=gate) for gate in (True, False))
    ]
    assert found[0] - found[1] == 6 * 3 * 32**2


def test_a_run_measures_its_own_documents(config, tmp_path):
    write_documents(tmp_path / "own_document", [np.arange(8)] * 40)
    c = config(str(tmp_path / "own_document"), reset_attention_mask=True)
    data = JobData(c, CPU)
    [(lengths, _)] = data.document_lengths()
    assert lengths.tolist() == [8] * 32  # the split `80,10,10` of 40 documents
    shape = shape_of(c, 264)
    speed = speed_of(c, shape, CPU, data.document_lengths())
    assert speed.flops_per_token[16] == 6 * (2 * 12 * 32**2 + 264 * 32) + 12 * 2 * 32 * 8


def test_skipped_steps_count_in_the_speed(config, monkeypatch, tmp_path):
    """Ten steps of 2 seconds, of which five are skipped: 8 sequences of 16 tokens in 2 seconds."""
    c = config(
        write_shards(tmp_path), log_interval=10, train_iters=20, peak_theoretical_tflops=0.001
    )
    clock = iter(np.arange(0.0, 40.0, 2.0))
    monkeypatch.setattr(step_log.time, "monotonic", lambda: float(next(clock)))
    logged = {}
    log = SimpleNamespace(
        line=lambda text: None,
        metrics=lambda step, values, text, *shorter: logged.update(values, text=text),
        progress=lambda number, steps, text: None,
    )
    engine, theta = SimpleNamespace(module=nn.Linear(1, 1)), SimpleNamespace(columns=dict)
    shape = shape_of(c, 264)
    hook = StepLog(c, engine, CPU, theta, speed_of(c, shape, CPU, []), log)
    hook.load_state({})
    for number in range(1, 11):
        step = Step(
            number, 0.1, torch.ones(()), None, 8 * number, 8,
            last=False, leaves=False, logs=number == 10, validates=False, saves=False,
            good=number % 2 == 0,
        )  # fmt: skip
        hook.before_step(number)
        hook.after_step(step)
    rate = 8 * 16 / 2
    flop = 6 * (2 * 12 * 32**2 + 264 * 32) + 12 * 2 * 32 * 16
    assert logged["train/tokens_per_second"] == rate
    assert (logged["train/samples_per_second"], logged["train/seconds_per_step"]) == (4, 2)
    assert logged["train/tflops_per_device"] == pytest.approx(rate * flop / 1e12)
    assert logged["train/mfu"] == pytest.approx(rate * flop / 1e12 / 0.001)
    assert "| 64 tokens/s | ETA 0:00:20" in logged["text"]  # ten steps are left


def test_the_rates_of_four_devices_by_hand(monkeypatch):
    """Of 8,000 tokens/s with 10^9 operations each, four devices have 2 TFLOP/s each."""
    usage = SimpleNamespace(ru_maxrss=10**6)  # KiB
    monkeypatch.setattr("resource.getrusage", lambda who: usage)
    found = Speed({16: 1e9}, 4, peak_tflops=8.0).metrics(8000.0, [16], torch.device("cpu"))
    assert found == {"train/tflops_per_device": 2.0, "train/mfu": 0.25, "train/memory_gb": 1.024}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 10**9)
    found = Speed({16: 1e9}, 4, None).metrics(8000.0, [16], torch.device("cuda"))
    assert found == {"train/tflops_per_device": 2.0, "train/memory_gb": 3.0}


def test_the_peak_is_that_of_a_gpu_in_16_bits(monkeypatch):
    name = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert known_peak(torch.device("cuda"), "bf16") == known_peak(torch.device("cuda"), "fp16")
    assert known_peak(torch.device("cuda"), "bf16") == 989
    assert known_peak(torch.device("cuda"), "fp32") is None
    assert known_peak(torch.device("cpu"), "bf16") is None
    name = "Radeon"
    assert known_peak(torch.device("cuda"), "bf16") is None
