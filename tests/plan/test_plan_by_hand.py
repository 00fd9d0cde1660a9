"""What a plan says about communication, time and remedies, with memory that is given."""

from __future__ import annotations

import re

import pytest
import torch

from megatron.config import load_config
from megatron.engine.errors import StartError
from megatron.engine.gpus import gpu_named
from megatron.plan import plan_text as module
from megatron.plan import search
from megatron.plan.live_tensors import LiveBytes
from megatron.plan.plan_text import GIB, plan_text, sent_per_step
from megatron.plan.step import SilentGroup, Step
from tests.helpers.paths import ROOT

FILES = [ROOT / "configs" / name for name in ("model/small.yml", "paper/train.yml")]
GIVEN = ["train_batch_size=null", "train_micro_batch_size_per_gpu=4", "pos_emb=rotary"]
GIVEN += ["num_layers=4", "checkpoint_activations=false", "precision=fp16"]


def config_of(*overrides, gpus=4):
    return load_config(FILES, [*GIVEN, *overrides], world_size=gpus)


def test_a_silent_group_counts_what_ring_algorithms_send():
    group = SilentGroup(4)
    small, large = torch.zeros(10), torch.zeros(100)
    assert group.allreduce([large], "options").wait()
    assert group.sent == 2 * 400 * 3 / 4
    group.sent = 0
    group._allgather_base(large, small)
    assert group.sent == 400 * 3 / 4
    alone = SilentGroup(1)
    alone.allreduce([large])
    assert alone.sent == 0


@pytest.mark.parametrize(
    ("stage", "accumulation", "halves", "in_fp32"),
    [(0, 3, 2, 4), (1, 3, 3, 5), (2, 3, 7, 13), (3, 3, 9, 12), (3, 1, 3, 4)],
)
@pytest.mark.parametrize("fp32", [False, True])
def test_bytes_of_gradients_and_weights(stage, accumulation, halves, in_fp32, fp32):
    """Half of a sum of 1,000 16-bit numbers over 4 ranks sends 2,000 x 3/4 bytes."""
    keys = [f"zero_optimization.stage={stage}", f"gradient_accumulation_steps={accumulation}"]
    keys.append(f"fp32_allreduce={str(fp32).lower()}")
    halves = in_fp32 if fp32 else halves
    step = Step([600, 400], sent={"tensor": 7, "pipeline": 0})
    assert sent_per_step(config_of(*keys), step) == {
        "data": halves * 1500, "tensor": 7 * accumulation, "pipeline": 0
    }  # fmt: skip


def test_context_parallel_ranks_are_replicas_and_one_rank_sends_nothing():
    step = Step([1000])
    both = config_of("context_parallel_size=2")
    assert sent_per_step(both, step)["data"] == 5 * 1500  # gradients are added in fp32
    assert sent_per_step(config_of(gpus=1), step)["data"] == 0


@pytest.fixture
def plan(monkeypatch):
    """Return a function from overrides to the plan's lines, with memory by a formula."""

    def write(memory_of, *overrides, gpus=4, gpu="V100", price=None, mfu=0.5, searched=False):
        calls = []

        def peak_of(config, vocab_size):
            calls.append(config)
            memory = {"weights": memory_of(config) * GIB, "gradients": 0.0, "optimizer": GIB / 4}
            return Step([1000], sent={"tensor": GIB // 2}), memory

        for place in (module, search):
            monkeypatch.setattr(place, "peak_of", peak_of)
        monkeypatch.setattr(search, "MOST_PLANNED", 10**6)  # they take no time here
        if not searched:
            monkeypatch.setattr(search, "_candidates", lambda *_: ())

        def load(*more):
            return config_of(*overrides, *more, gpus=gpus)

        return plan_text(load, gpu, mfu, price).splitlines()

    return write


def test_a_plan_that_fits(plan):
    lines = plan(lambda config: 2.5)
    assert "memory of the fullest rank, in GiB" in lines
    at = lines.index("memory of the fullest rank, in GiB")
    assert lines[at + 1 : at + 4] == [
        f"  {'weights':<16}    2.50",
        f"  {'optimizer':<16}    0.25",
        f"  {'in all':<16}    2.75: fits into 90% of 32",
    ]
    assert lines[at + 4 : at + 7] == [
        "what this rank sends in a step, in GiB",
        f"  {'data':<16}    0.00",
        f"  {'tensor':<16}    0.50",
    ]
    assert not any("that fit" in line or "price" in line for line in lines)


def test_the_memory_that_is_usable_is_nine_tenths(plan):
    usable = 0.9 * gpu_named("V100").memory - 0.25
    for more, word in ((-0.001, "fits"), (0.001, "does not fit")):
        lines = plan(lambda config, more=more: usable + more)
        assert any(line.endswith(f": {word} into 90% of 32") for line in lines)


def remedies(lines):
    at = lines.index("the fastest layouts that fit, with the same train_batch_size")
    return lines[at + 1 :]


def test_a_run_that_does_not_fit_gets_layouts_that_do_and_keep_the_batch(plan):
    def needs(config):
        assert config.batch.train_batch_size == 32
        p = config.parallel
        fits = config.model.checkpoint_activations and p.model_parallel_size > 1
        return 10 if fits and p.zero_stage > 1 else 40

    lines = remedies(plan(needs, "train_micro_batch_size_per_gpu=8", searched=True))
    found = lines[::2]
    assert len(found) == search.BEST and all("10.2 GiB: -o" in line for line in found)
    for line in found:
        given = dict(each.split("=") for each in re.findall(r"-o (\S+)", line))
        assert given["checkpoint_activations"] == "true" and given["model_parallel_size"] in "24"
        assert given["zero_optimization.stage"] in "23" and given["train_batch_size"] == "32"
    seconds = [float(line.split()[0]) for line in found]
    assert seconds == sorted(seconds)


def test_nothing_fits(plan):
    assert remedies(plan(lambda config: 1000.0)) == [search.NOTHING_FITS]


@pytest.mark.parametrize(("precision", "rate"), [("fp32", "rate32"), ("fp16", "rate16")])
def test_the_rate_is_that_of_the_precision(plan, precision, rate):
    lines = plan(lambda config: 1.0, f"precision={precision}", mfu=0.25)
    expected = 0.25 * getattr(gpu_named("V100"), rate)
    assert any(f"each GPU reaches {expected:.0f} TFLOP/s" in line for line in lines)


@pytest.mark.parametrize(("mfu", "fine"), [(0.0, False), (1.0, True), (1.01, False), (-1, False)])
def test_efficiencies(plan, mfu, fine):
    if fine:
        assert plan(lambda config: 1.0, mfu=mfu)
    else:
        with pytest.raises(StartError, match="a number above 0 and at most 1"):
            plan(lambda config: 1.0, mfu=mfu)


def test_documents_are_told(plan):
    told = "each sequence counts as one document; shorter documents take less time"
    assert plan(lambda config: 1.0, "reset_attention_mask=true")[-1] == told
    assert told not in plan(lambda config: 1.0)


def test_live_bytes_count_a_storage_once_and_forget_it_once():
    outside = torch.ones(10, device="meta")
    with LiveBytes("meta") as live:
        view = outside[:5]
        assert live.now == 40  # a view of a tensor from outside
        more = view.view(5)
        assert (live.now, live.peak) == (40, 40)
        del view, more
        new = torch.ones(3, device="meta") + outside[:3]
        assert live.now == 52 and live.peak == 64
        assert (live.restart(), live.peak) == (64, 52)
        del new
        assert live.now == 40


def test_the_plan_of_a_curriculum_says_what_its_time_is(plan):
    text = "a step's time is the mean over the lengths of the curriculum"
    assert text not in plan(lambda config: 1)
    assert text in plan(lambda config: 1, "curriculum=[[0, 128], [10, 512]]")
