"""Test the estimated time of a step: products, traffic and bubbles counted by hand; the search."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron.engine.build import plan_of
from megatron.engine.gpus import Gpu, gpu_named, gpu_of_device
from megatron.engine.training.speed import keys_per_query
from megatron.plan import search
from megatron.plan.memory import peak_of
from megatron.plan.plan_text import plan_text
from megatron.plan.step import Step, measured_step
from megatron.plan.step_time import CALIBRATED, Cluster, Rates, step_time
from tests.plan.test_plan_by_hand import config_of

GPU = Gpu(100, 10, 80, bandwidth=1000, link=100, network=800, multiprocessors=0)
IDEAL = Rates(1, 1, moves=0, link=1, network=1, hides=1, interval=(0.9, 1.1))
CLUSTER = Cluster(GPU, 8, 800)
VOCABULARY = 1024


def time_of(*overrides, gpus=8, step=None, rates=IDEAL, cluster=CLUSTER):
    config = config_of("hidden_size=512", "num_attention_heads=8", *overrides, gpus=gpus)
    shape = plan_of(config, VOCABULARY, device_type="cuda", eod=0).shape
    step = step or Step([1_000_000], sent={})
    return step_time(config, step, shape, keys_per_query(config), cluster, rates)


BLOCK, TOKENS, LENGTH = 12 * 512**2, 4 * 512, 512
ATTENTION = 4 * 512 * LENGTH  # forward operations of a token
WEIGHTS = 2 * 6 / 1e12  # seconds to read a weight three times and to add its gradient, in 16 bits


def test_operations_of_the_products_by_hand():
    """Four blocks of 12 h² weights, three passes, or four with recomputation; logits never again.

    On a GPU whose 100 TFLOP/s are all reached, and with an accumulation of the weights' gradients.
    """
    weights = 4 * BLOCK + VOCABULARY * 512
    blocks, logits = TOKENS * 4 * (2 * BLOCK + ATTENTION), TOKENS * 2 * VOCABULARY * 512
    found = time_of("gradient_accumulation_steps=3")
    assert found.compute == pytest.approx(3 * (3 * (blocks + logits) / 1e14 + weights * WEIGHTS))
    again = time_of("gradient_accumulation_steps=3", "checkpoint_activations=true")
    more = blocks / 1e14 + 4 * BLOCK * 2 / 1e12
    assert again.compute - found.compute == pytest.approx(3 * more)


def test_memory_traffic_and_waves_by_hand():
    """A pass moves input and output of each product; half a wave is 128 x 256 outputs for each K.

    The products of a block are 512 x 1536, 512 x 512, 512 x 2048 and 2048 x 512.
    """
    plain = time_of().compute
    numbers = TOKENS * (4 * (4 * 512 + 1536 + 2048 + 2 * 512 + 2 * 512 + 512) + 512 + VOCABULARY)
    moved = time_of(rates=replace(IDEAL, moves=2)).compute - plain
    assert moved == pytest.approx(3 * 2 * 2 * numbers / 1e12)
    cluster = Cluster(replace(GPU, multiprocessors=10), 8, 800)
    inner = 4 * (2048 + 512 + 1024 + 2560 + 2560) - 4 * 512 + 512 + VOCABULARY
    waves = time_of(cluster=cluster).compute - plain
    assert waves == pytest.approx(128 * 256 * 10 * inner / 1e14)


def test_fp32_takes_its_own_rate_and_twice_the_bytes():
    """10 instead of 100 TFLOP/s, and 4 bytes for each weight."""
    products = 3 * TOKENS * (4 * (2 * BLOCK + ATTENTION) + 2 * VOCABULARY * 512)
    weights = 4 * BLOCK + VOCABULARY * 512
    found = time_of("precision=fp32").compute
    assert found == pytest.approx(products / 1e13 + 2 * weights * WEIGHTS)


def test_the_cpu_launches_small_steps():
    found = time_of(step=Step([10] * 7, launches=100_000, sent={}))
    assert found.compute == pytest.approx(1.0)  # 10 microseconds each
    assert found.optimizer == pytest.approx(7 * 10 * 1e-5)


def test_a_pipeline_waits_for_its_stages():
    """Two stages of two blocks: the last one also computes the logits. One of 5 + 1 turns waits."""
    keys = ["pipe_parallel_size=2", "gradient_accumulation_steps=5"]
    found = time_of(*keys)
    assert found.bubble == pytest.approx(found.compute / 5)
    flop = 3 * TOKENS * (2 * (2 * BLOCK + ATTENTION) + 2 * VOCABULARY * 512)
    weights = 2 * BLOCK + VOCABULARY * 512
    assert found.compute == pytest.approx(5 * (flop / 1e14 + weights * WEIGHTS))
    # A micro-batch sends its activations forward and gradients back, 1 GB each, at 100 GB/s.
    sends = time_of(*keys, step=Step([1], sent={"pipeline": 10**9}))
    assert sends.bubble - found.bubble == pytest.approx(2 / 100)
    assert sends.exposed == pytest.approx(5 * 2 / 100, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "stride", "world", "seconds"),
    [
        (8, 1, 8, 1 / 100),  # a machine of 8: the link alone
        (8, 1, 64, 1 / 100),  # a group in each of 8 machines
        (16, 1, 64, 1 / 100),  # over 2 machines, one group uses 100 GB/s of network
        (8, 8, 64, 8 / 100),  # one rank in each machine: 8 groups share its network
        (16, 4, 64, 4 / 100),  # two ranks in each: 4 groups
        (64, 1, 64, 1 / 100),
        (2, 1, 2, 1 / 100),
    ],
)
def test_groups_share_the_network_of_a_machine(size, stride, world, seconds):
    """Each rank sends 1 GB. The links have 100 GB/s, and each machine 800 Gbit/s."""
    assert CLUSTER.seconds(1e9, size, stride, world, IDEAL) == pytest.approx(seconds)
    half = replace(IDEAL, link=0.5, network=0.5)
    assert CLUSTER.seconds(1e9, size, stride, world, half) == pytest.approx(2 * seconds)


def test_a_slow_network_counts_only_between_machines():
    slow = Cluster(GPU, 8, 80)
    assert slow.seconds(1e9, 8, 1, 64, IDEAL) == pytest.approx(1 / 100)
    assert slow.seconds(1e9, 16, 1, 64, IDEAL) == pytest.approx(1 / 10)


def traffic(stage, *overrides, hides=1.0):
    """Return the time of a step with 10^9 parameters in 16 bits, on 8 replicas at 100 GB/s."""
    keys = [f"zero_optimization.stage={stage}", "gradient_accumulation_steps=2"]
    keys.append("fp32_allreduce=false")
    return time_of(
        *keys, *overrides, step=Step([10**9], sent={}), rates=replace(IDEAL, hides=hides)
    )


HALF = 2 * 7 / 8 / 100  # seconds: 2 GB x 7/8, reduced to slices or gathered


@pytest.mark.parametrize(("stage", "halves"), [(0, 2), (1, 3), (2, 5), (3, 6)])
def test_traffic_of_zero_by_hand(stage, halves):
    """All is exposed, or, with ZeRO-3, hidden as far as there is something to compute."""
    found = traffic(stage)
    assert found.exposed + found.hidden == pytest.approx(halves * HALF)
    assert found.hidden == pytest.approx(found.compute if stage == 3 else 0)


def test_overlap_hides_sums_behind_backward_passes():
    """Two of three passes of a micro-batch are backward; ZeRO-1 sums in the last micro-batch."""
    on = "zero_optimization.overlap_comm=true"
    compute = traffic(1, on).compute
    assert traffic(1, on).hidden == pytest.approx(compute / 2 * 2 / 3)
    assert traffic(2, on).hidden == pytest.approx(compute * 2 / 3)
    assert traffic(2, on, hides=0.25).hidden == pytest.approx(compute * 2 / 3 / 4)
    assert traffic(3, "zero_optimization.overlap_comm=false").hidden == 0
    assert traffic(1, on, "pipe_parallel_size=2").hidden == 0  # DeepSpeed switches it off


def test_the_optimizer_moves_seven_numbers():
    """28 bytes for each parameter, of which ZeRO gives each rank an eighth; 1,000 GB/s."""
    assert traffic(0).optimizer == pytest.approx(28e9 / 1e12)
    assert traffic(1).optimizer == pytest.approx(28e9 / 8 / 1e12)


def text_of(*overrides, gpus=64, **keys):
    given = ["hidden_size=512", "num_attention_heads=32", "pos_emb=none", *overrides]
    lines = plan_text(lambda *more: config_of(*given, *more, gpus=gpus), "H100", **keys)
    return lines.splitlines()


def test_the_text_has_the_parts_and_an_interval():
    lines = text_of("gradient_accumulation_steps=2")
    at = next(n for n, line in enumerate(lines) if line.startswith("a step of"))
    seconds, low, high = map(
        float, re.findall(r"([\d.e-]+) s \(([\d.e-]+) to ([\d.e-]+)\)", lines[at])[0]
    )
    assert [low / seconds, high / seconds] == pytest.approx(CALIBRATED.interval, rel=0.01)
    parts = dict(line.split() for line in lines[at + 2 : at + 7])
    assert list(parts) == ["compute", "bubble", "exposed", "hidden", "optimizer"]
    total = sum(float(value) for name, value in parts.items() if name != "hidden")
    assert total == pytest.approx(seconds, rel=0.01)


def test_tensor_parallelism_over_machines_warns():
    def warned(tensor, **keys):
        lines = text_of(f"model_parallel_size={tensor}", "num_layers=1", **keys)
        return [line for line in lines if line.startswith("warning: ")]

    assert not warned(8)
    [line] = warned(16)
    assert line.startswith("warning: tensor parallelism of 16 crosses machines of 8 GPUs")
    assert warned(8, per_node=4) and not warned(4, per_node=4)


def test_a_faster_network_and_larger_machines_save_time():
    def seconds(**keys):
        line = next(line for line in text_of("num_layers=1", **keys) if "a step of" in line)
        return float(re.findall(r"about ([\d.e-]+) s", line)[0])

    assert seconds(network=1.0) > 2 * seconds()
    assert seconds(network=1.0, per_node=64) < seconds(network=1.0)


def test_new_gpus():
    names = ["NVIDIA RTX A6000", "NVIDIA RTX 6000 Ada Generation", "NVIDIA GeForce RTX 3090"]
    found = [gpu.rate16 for gpu in map(gpu_of_device, names) if gpu]
    assert found == [154.8, 364.2, 71]
    assert gpu_named("a6000").link == 32  # PCIe 4: NVLink joins pairs only


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model_parallel_size=4", "checkpoint_activations=true"),
        ("pipe_parallel_size=4", "gradient_accumulation_steps=4"),
        ("activation=swiglu", "num_kv_heads=4"),
    ],
)
def test_sketches_are_close_to_the_plan(overrides):
    """The search sketches all candidates, and plans those that may fit."""
    config = config_of("num_layers=8", "pos_emb=none", *overrides, gpus=8)
    shape = plan_of(config, VOCABULARY, device_type="cuda", eod=0).shape
    sketch, step = search.sketched(config, shape), measured_step(config, VOCABULARY, 0)
    assert sketch.size == pytest.approx(step.size, rel=0.15)
    assert sketch.sent["tensor"] == pytest.approx(step.sent["tensor"], rel=0.25)
    assert sketch.sent["pipeline"] == step.sent["pipeline"]
    assert sketch.kept == pytest.approx(step.kept, rel=0.6)


def test_the_search_lists_five_layouts_that_fit(monkeypatch):
    monkeypatch.setattr(search, "MOST_PLANNED", 6)
    lines = text_of("train_batch_size=512", "num_layers=4", gpus=16, search=True)
    at = lines.index("the fastest layouts that fit, with the same train_batch_size")
    found = lines[at + 1 :: 2]
    assert len(found) == search.BEST and all("-o model_parallel_size=" in line for line in found)
    seconds = [float(line.split()[0]) for line in found]
    assert seconds == sorted(seconds)
    assert all(line.startswith("    computes") for line in lines[at + 2 :: 2])
    best = re.findall(r"-o (\S+)", found[0])
    config = config_of("hidden_size=512", "num_attention_heads=32", "pos_emb=none", *best, gpus=16)
    assert config.batch.train_batch_size == 512
    memory = sum(peak_of(config, 50257)[1].values()) / 2**30
    assert f"{memory:.1f} GiB" in found[0]


def test_a_search_without_a_result(monkeypatch):
    monkeypatch.setattr(search, "peak_of", lambda *_: (Step([1]), {"weights": 1e15}))
    monkeypatch.setattr(search, "MOST_PLANNED", 2)
    assert text_of("train_batch_size=512", gpus=8, search=True)[-1] == search.NOTHING_FITS
