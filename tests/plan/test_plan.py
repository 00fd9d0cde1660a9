"""Test the plan of a run: its memory against a real run's, its numbers and its messages."""

import sys
from functools import partial

import pytest
import torch
import yaml

import train
from megatron.attention.fused import functions_of
from megatron.config import load_config
from megatron.engine.build import plan_of
from megatron.engine.gpus import gpu_named, gpu_of_device
from megatron.plan import search
from megatron.plan.live_tensors import LiveBytes
from megatron.plan.memory import peak_of
from megatron.plan.plan_text import plan_text, sent_per_step
from megatron.plan.step import measured_step
from tests.helpers.jobs import BASE, run_job, write_shards
from tests.helpers.launch import run_ranks
from tests.helpers.paths import ROOT

VOCABULARY = 257  # of bytes
SMALL = {"train_iters": 2, "eval_iters": 0, "hidden_size": 128, "seq_length": 32, "log_interval": 9}
SMALL |= {"train_micro_batch_size_per_gpu": 4, "make_vocab_size_divisible_by": 512}
SMALL |= {"no_weight_tying": True, "zero_optimization": {"stage": 1, "reduce_bucket_size": 2e5}}
LAYOUTS = {
    "ZeRO-3": {"zero_optimization": {"stage": 3, "reduce_bucket_size": 2e5}},
    "tensor": {"model_parallel_size": 2, "checkpoint_activations": True, "precision": "bf16"},
    # Most of its memory is activations, which DeepSpeed keeps through the backward pass.
    "stages": {"pipe_parallel_size": 2, "gradient_accumulation_steps": 3, "seq_length": 128},
    "Muon": {
        "optimizer": {"type": "Muon", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1e4},
        "hidden_size": 256,
        "train_micro_batch_size_per_gpu": 1,
    },
    "default bucket": {"zero_optimization": {"stage": 2}},
}


def tensor_bytes(groups, configs):
    """Return the peak of a rank's tensors for each config."""
    peaks = []
    for config in configs:
        with LiveBytes("cpu") as live:
            run_job(groups, config)
        peaks.append(live.peak)
    return peaks


def test_peaks_of_real_runs(tmp_path, monkeypatch):
    """The plan is within a tenth of the tensors that real runs hold at most."""
    monkeypatch.chdir(tmp_path)
    data, configs = {"data_path": write_shards(tmp_path)}, []
    for name, keys in LAYOUTS.items():
        configs.append(tmp_path / f"{name}.yml")
        configs[-1].write_text(yaml.safe_dump(BASE | SMALL | keys | data))
    measured = run_ranks(2, tensor_bytes, configs)
    for config, peaks in zip(configs, zip(*measured, strict=True), strict=True):
        _, memory = peak_of(load_config([config], world_size=2), VOCABULARY, "cpu")
        assert sum(memory.values()) == pytest.approx(max(peaks), rel=0.1), (config.stem, memory)
        assert max(peaks) < 1e8, "the bucket is as large as DeepSpeed's default, 2 GB"


def test_live_bytes():
    """Views and freed tensors do not count."""
    x = torch.ones(100)
    with LiveBytes("cpu") as live:
        y = x * 2
        z = y.view(10, 10).T
        assert live.now == 400
        y = z = torch.cat([z, z])
        assert (live.now, live.restart()) == (800, 1200)
        torch.empty(1000, device="meta")
        assert live.peak == 800
        del y, z
        assert live.now == 0


def config_of(*overrides, gpus=1, files=("model/small.yml", "paper/train.yml")):
    paths = [ROOT / "configs" / file for file in files]
    given = ["train_batch_size=null", "train_micro_batch_size_per_gpu=4", "pos_emb=rotary"]
    given += ["num_layers=4", "checkpoint_activations=false"]
    return load_config(paths, [*given, *overrides], world_size=gpus)


def kept(*overrides, gpus=1, stage=0):
    config = config_of(*overrides, "precision=fp16", gpus=gpus)  # Triton's interpreter has no bf16
    return measured_step(config, 256, stage).kept


def test_layouts_divide_memory():
    """Each remedy saves the expected memory. The plan uses the fused kernels without a GPU."""
    x = 4 * 512 * 768 * 2  # bytes of the hidden states
    plain, deep = kept(), kept("num_layers=8")
    assert (deep - plain) / (4 * x) == pytest.approx(18, abs=1.5)  # 34 bytes, `lost`, rotated q, k
    recomputed = kept("num_layers=8", "checkpoint_activations=true")
    recomputed -= kept("checkpoint_activations=true")
    assert recomputed == pytest.approx(4 * x, rel=0.01)
    assert kept("train_micro_batch_size_per_gpu=2") == pytest.approx(plain / 2, rel=0.05)
    sharded = kept("model_parallel_size=2", "sequence_parallel=true", gpus=2)
    assert sharded == pytest.approx(plain / 2, rel=0.15)  # sharded layers save their full input
    assert kept("context_parallel_size=2", gpus=2) == pytest.approx(plain / 2, rel=0.1)
    gated = kept("attention_output_gate=true")  # each layer also keeps the gate and the product
    assert gated - plain == pytest.approx(4 * 2 * x, rel=0.01)


def test_sent_bytes():
    """Collectives send what the formulas of ring algorithms say."""
    config = config_of("model_parallel_size=2", "precision=bf16", gpus=4)
    step = measured_step(config, 50257, 0)
    sent = sent_per_step(config, step)
    # Over two ranks, a sum in fp32 (`fp32_allreduce`) sends 4 bytes, and a gathering in bf16 one
    assert sent["data"] == (4 + 1) * step.size
    x = 4 * 512 * 768 * 2
    # two sums forward and two backward in each block, and one for embedding and output
    assert sent["tensor"] == pytest.approx((4 * 4 + 2) * x, rel=0.02)


def test_copies_of_key_heads_are_sent():
    """With 12 heads and two key heads, each of four context-parallel ranks gets a copy of one."""
    config = config_of("context_parallel_size=4", "num_kv_heads=2", "precision=fp16", gpus=4)
    row = 64 * 2 * 4 * 512 / 4  # bytes of one head, of the positions of one rank
    exchanged = (12 + 2 * 4) * row + 12 * row  # queries, copies of keys and values; outputs
    sent = measured_step(config, 50257, 0).sent["context"]
    # The losses, fp32, are gathered and their gradients scattered
    assert sent == 3 / 4 * (2 * 4 * exchanged + 2 * 4 * 4 * 512)


def test_memory_by_zero_stage():
    """ZeRO divides optimizer, gradients and weights, in this order."""

    def needs(stage):
        given = ["precision=bf16", "train_micro_batch_size_per_gpu=1", "num_layers=2"]
        config = config_of(*given, f"zero_optimization.stage={stage}", gpus=8)
        return peak_of(config, 50257)

    found = [needs(stage) for stage in range(4)]
    size = found[0][0].size
    optimizer, weights, gradients = (
        [memory[kind] for _, memory in found] for kind in ("optimizer", "weights", "gradients")
    )
    assert optimizer == [12 * size, *[12 * size / 8] * 3]
    assert weights[:3] == [2 * size] * 3 and weights[3] < 2 * size * 2.2
    assert gradients[1] > 4 * gradients[2]


def test_first_stage_holds_more_micro_batches():
    """Stages hold the micro-batches that are in flight.

    The last one also holds old logits, and with them its input and the input's gradient.
    """

    def step(stage, micro_batches):
        given = ["pipe_parallel_size=4", f"gradient_accumulation_steps={micro_batches}"]
        return measured_step(config_of(*given, "precision=fp16", gpus=4), 256, stage)

    first, last, x, logits = step(0, 8), step(3, 8), 4 * 512 * 768 * 2, 4 * 512 * 256 * 2
    assert first.kept == 4 * (step(0, 1).kept - x) + x  # one buffer to exchange hidden states
    assert last.kept == step(3, 1).kept + logits + 2 * x
    assert last.left > 2 * logits
    assert [first.sent["pipeline"], step(1, 1).sent["pipeline"]] == [x, 2 * x]


def test_activations_stay_beside_theta():
    """DeepSpeed keeps a graph until the last of several outputs went back, here theta."""

    def working_space(pos):
        given = [f"pos_emb={pos}", "pipe_parallel_size=2", "gradient_accumulation_steps=1"]
        step = measured_step(config_of(*given, gpus=2), 256, 0, "cpu")
        return max(used for _, used in step.moments) - step.kept

    assert working_space("kerple_log") > 1.3 * working_space("alibi")


def test_gpus_by_their_cuda_names():
    names = ["Tesla V100-SXM2-32GB", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe"]
    names += ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GeForce RTX 4090"]
    found = [gpu.rate16 for gpu in map(gpu_of_device, names) if gpu]
    assert found == [125, 312, 756, 989, 989, 165]
    others = ["NVIDIA T4", "Tesla V100-PCIE-32GB", "NVIDIA H200 NVL", "NVIDIA GB200"]
    others += ["NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU"]
    others += ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 D"]
    others += ["NVIDIA GH200 480GB", "Tesla V100S-PCIE-32GB", "GRID A100D-80C"]
    assert [name for name in others if gpu_of_device(name)] == []


@pytest.mark.parametrize(
    "given",
    [
        ["pos_emb=rotary+kerple_log", "precision=fp16"],
        ["num_attention_heads=2", "reset_attention_mask=true", "attention_dropout=0.1"],
    ],
    ids=["a kernel beside rotary", "documents and dropout in blocked attention"],
)
def test_attention_without_values(given):
    """Nothing of a step reads values, which tensors of a plan do not have."""
    functions_of.cache_clear()  # a kernel's formula is read inside the plan, as in a new process
    backend = plan_of(config_of(*given), 256, device_type="cuda", eod=0).attends[0].name
    assert backend == ("fused" if "fp16" in given[1] else "blocked")
    assert kept(*given) > 0


def run(monkeypatch, *arguments):
    files = [str(ROOT / "configs" / f) for f in ("model/20B.yml", "paper/train.yml")]
    given = ["-o", "pos_emb=rotary", "-o", "num_layers=2", "--plan"]
    given += ["-o", "hidden_size=10240"]
    monkeypatch.setattr(sys, "argv", ["train.py", *files, *given, *arguments])
    return train.main()


def test_command(monkeypatch, capsys):
    """A model that is too large gets layouts that fit; with one, it fits, with the same batch."""
    monkeypatch.setenv("WORLD_SIZE", "2")  # --gpus wins
    monkeypatch.setattr(search, "BEST", 1)
    given = ["-o", "train_batch_size=32", "-o", "train_micro_batch_size_per_gpu=2"]
    given += ["--gpus", "4", "--price", "2", "--gpu", "4090"]
    assert run(monkeypatch, *given) == 0
    text = capsys.readouterr().out
    assert "on 4 4090" in text and "does not fit into 90% of 24" in text
    assert "GPU hours" in text and "at 2 for a GPU hour" in text
    assert "a vocabulary of 50,257" in text
    fits = next(line for line in text.splitlines() if " GiB: -o " in line)
    assert run(monkeypatch, *given, *fits.partition(": ")[2].split()) == 0
    again = capsys.readouterr().out
    assert ": fits into 90% of 24" in again and "layouts that fit" not in again
    tokens = f"a step of {32 * 512:,} tokens"
    assert tokens in text and tokens in again


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "H1000"], "did you mean H100? known: V100, A100-40"),
        (["--gpu", "V100", "-o", "precision=bf16"], "write precision: fp16"),
        (["--mfu", "40"], "such as 0.4"),
        (["--gpus", "6", "-o", "model_parallel_size=4"], "a multiple of 4"),
        (["--gpus", "many"], "'many'"),
        (["--gpus", "0"], "argument --gpus: 0 is not in [1, inf]"),
        (["--price", "nan"], "argument --price: nan is not in [0.0, inf]"),
    ],
)
def test_mistakes(monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run(monkeypatch, *arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("window", [None, 99])
def test_time_and_cost_by_hand(window):
    """Two layers of width 512, a vocabulary of 50,257 padded to 50,304, on 4 GPUs at 40%."""
    given = ["num_layers=2", "hidden_size=512", "num_attention_heads=8", "seq_length=1000"]
    given += [
        "train_micro_batch_size_per_gpu=8",
        "train_batch_size=32",
        "train_iters=360000",
        "bf16.enabled=true",
        "pos_emb=kerple_log",
    ]
    given += [f"sliding_window_width={window}"] * (window is not None)
    load = partial(load_config, [ROOT / "configs/paper/train.yml"], world_size=4)
    text = plan_text(lambda *more: load([*given, *more]), "H100", 0.4, 2.0)
    keys = 1000 if window is None else 100
    flop = 6 * (2 * 12 * 512**2 + 50304 * 512) + 12 * 2 * 512 * keys
    seconds = 32 * 1000 * flop / (4 * 0.4 * gpu_named("H100").rate16 * 1e12)
    hours = 360000 * seconds / 3600
    assert f"32,000 tokens and {32000 * flop:.3g} FLOP takes {seconds:.3g} s " in text
    assert f"360,000 steps take {hours:,.1f} hours, {4 * hours:,.0f} GPU hours" in text
    assert f"which cost {8 * hours:,.0f} at 2 for a GPU hour" in text
