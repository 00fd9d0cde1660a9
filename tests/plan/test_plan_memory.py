"""Each kind of memory at each moment of a step, against the table of `plan/memory.py` by hand.

The rank has N = 1,000 parameters in two tensors, and buckets of 100 numbers. Four ranks have the
same weights. The tensors of the moment in question are larger than all other memory.
"""

from __future__ import annotations

import pytest

from megatron.config import load_config
from megatron.plan import memory
from megatron.plan.step import Step
from tests.helpers.paths import ROOT

N, D, LARGE = 1000, 4, 10**6
PRECISIONS = {"bf16": 2, "fp32": 4}


def config_of(stage, precision, *overrides, **zero):
    options = {"stage": stage, "reduce_bucket_size": 100, **zero}
    written = ", ".join(f"{key}: {value}" for key, value in options.items())
    given = [f"zero_optimization={{{written}}}", f"precision={precision}", "fp32_allreduce=false"]
    given += overrides
    given += ["train_batch_size=null", "train_micro_batch_size_per_gpu=4", "pos_emb=rotary"]
    files = [ROOT / "configs" / name for name in ("model/small.yml", "paper/train.yml")]
    return load_config(files, given, world_size=D)


@pytest.fixture
def peak(monkeypatch):
    """Return a function from a config and the keys of a step to the peak's memory."""

    def measure(config, device_type="cuda", **keys):
        step = Step([600, 400], **keys)
        monkeypatch.setattr(memory, "measured_step", lambda *_: step)
        found, kinds = memory.peak_of(config, 50, device_type)
        assert found is step
        return kinds

    return measure


def in_backward(done, kept=LARGE):
    """Return the keys of a step whose largest moment is in the backward pass."""
    return {"kept": kept, "moments": [(0, 5), (done, LARGE + 70)]}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_backward_pass_without_zero(peak, precision, accumulation):
    b = PRECISIONS[precision]
    config = config_of(0, precision, f"gradient_accumulation_steps={accumulation}")
    assert peak(config, **in_backward(done=600)) == {
        "weights": b * N,
        "optimizer": (8 if precision == "fp32" else 12) * N,
        "gradients": b * (N if accumulation > 1 else 600),
        "activations": LARGE,
        "working space": 70,
        "communication": 0,
    }


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_second_bucket_of_overlapping_communication(peak, stage, overlap):
    config = config_of(stage, "bf16", overlap_comm=str(overlap).lower())
    gradients = {1: 2 * 600, 2: 2 * N / D}[stage]
    assert peak(config, **in_backward(done=600)) == {
        "weights": 2 * N,
        "optimizer": 12 * N / D,
        "gradients": gradients,
        "activations": LARGE,
        "working space": 70,
        "communication": 2 * 100 * (2 if overlap else 1) + (2 * 100 if stage == 2 else 0),
    }


@pytest.mark.parametrize(("stage", "copies"), [(1, 4 * 100), (2, 4 * 100 + 2 * 100)])
def test_a_full_bucket_is_copied(peak, stage, copies):
    """In the type of the sums, here fp32; with ZeRO-2, the slices of ranks also side by side."""
    config = config_of(stage, "bf16", "fp32_allreduce=true")
    assert peak(config, **in_backward(done=600))["communication"] == 2 * 100 + copies
    assert peak(config, **in_backward(done=100))["communication"] == 2 * 100
    assert peak(config, **in_backward(done=N))["communication"] == 2 * 100 + copies
    if stage == 1:
        assert peak(config, left=LARGE)["communication"] == 2 * 100 + copies


def test_pipelines_have_one_bucket(peak):
    """DeepSpeed switches `overlap_comm` off there."""
    keys = {"overlap_comm": "true"}
    config = config_of(1, "bf16", "pipe_parallel_size=2", **keys)
    assert peak(config, **in_backward(done=600))["communication"] == 2 * 100


@pytest.mark.parametrize(
    ("done", "accumulation", "shards"), [(100, 1, 0), (101, 1, 1), (100, 3, 1), (101, 3, 2)]
)
def test_zero_2_divides_gradients_after_the_first_bucket(peak, done, accumulation, shards):
    config = config_of(2, "bf16", f"gradient_accumulation_steps={accumulation}")
    found = peak(config, **in_backward(done))
    communication = 400 if done > 100 else 200  # with a copy of a full bucket
    assert (found["gradients"], found["communication"]) == (2 * shards * N / D, communication)


def test_zero_1_needs_its_bucket_from_the_first_gradient_on_or_if_it_accumulates(peak):
    keys = {"kept": LARGE, "moments": [(0, LARGE)]}
    assert peak(config_of(1, "bf16"), **keys)["communication"] == 0
    several = peak(config_of(1, "bf16", "gradient_accumulation_steps=2"), **keys)
    assert (several["communication"], several["gradients"]) == (200, 2 * N)


@pytest.mark.parametrize(("threshold", "prefetched"), [(399, 1000), (400, 600), (600, 0)])
def test_zero_3_gathers_and_prefetches_what_is_divided(peak, threshold, prefetched):
    more = {"stage3_param_persistence_threshold": threshold}
    found = peak(config_of(3, "bf16", **more, overlap_comm="true"), **in_backward(done=600))
    assert found["weights"] == 2 * N / D + 2 * (N + prefetched)
    assert (found["gradients"], found["communication"]) == (2 * N / D, 200)
    assert found["optimizer"] == 12 * N / D
    limits = {"stage3_max_live_parameters": 300, "stage3_prefetch_bucket_size": 50}
    found = peak(config_of(3, "bf16", **more, **limits), **in_backward(done=600))
    assert found["weights"] == 2 * N / D + 2 * (300 + min(prefetched, 50))


def test_what_is_not_kept_is_working_space(peak):
    early = peak(config_of(0, "fp32"), kept=2 * LARGE, moments=[(0, LARGE)])
    assert (early["activations"], early["working space"]) == (LARGE, 0)


SUMS_IN_FP32 = ("gradient_accumulation_steps=2", "data_types.grad_accum_dtype=fp32")


def test_gradients_are_accumulated_in_fp32(peak):
    found = peak(config_of(1, "bf16", *SUMS_IN_FP32), **in_backward(done=600))
    assert found["gradients"] == 4 * N + 2 * 600
    assert (
        peak(config_of(3, "bf16", *SUMS_IN_FP32), **in_backward(done=600))["gradients"] == 4 * N / D
    )


@pytest.mark.parametrize(
    ("stage", "precision", "keys", "gradients", "communication"),
    [
        (0, "fp32", {}, 4 * N, 4 * N),  # all gradients, and a copy of them
        (0, "bf16", {}, 6 * N, 0),  # in the optimizer's step
        (1, "bf16", {}, 2 * (N - 100) + 2 * N / D, 200),
        (1, "fp32", {}, 4 * (N - 100) + 4 * N / D, 400),
        (1, "fp32", {"reduce_bucket_size": 900}, 4 * N, 4 * 900),
        (1, "bf16", {"overlap_comm": "true"}, 2 * (N - 100) + 2 * N / D, 400),
        (1, "bf16", SUMS_IN_FP32, 6 * N, 6 * N),
        (2, "bf16", {}, 8 * N / D, 0),
        (3, "bf16", {}, 8 * N / D, 0),
        (3, "bf16", SUMS_IN_FP32, 8 * N / D, 0),
    ],
)
def test_adding_gradients_and_the_optimizers_step(
    peak, stage, precision, keys, gradients, communication
):
    overrides, zero = (keys, {}) if keys is SUMS_IN_FP32 else ((), keys)
    found = peak(config_of(stage, precision, *overrides, **zero), left=LARGE)
    assert (found["gradients"], found.get("communication", 0)) == (gradients, communication)
    assert found["activations"] == LARGE


def test_the_fuller_of_the_first_and_the_last_stage_counts(monkeypatch):
    left = {0: 100, 1: 10**9, 2: 10**9, 3: 200}
    steps = {stage: Step([10], left=value) for stage, value in left.items()}
    monkeypatch.setattr(memory, "measured_step", lambda config, vocab, stage, kind: steps[stage])
    config = config_of(1, "bf16", "pipe_parallel_size=4")
    assert memory.peak_of(config, 50)[0] is steps[3]


@pytest.mark.parametrize(
    ("keys", "bytes_each"),
    [({"momentum": 0.9}, 4), ({"momentum": 0.0}, 0)],
)
def test_sgd_has_one_average_or_none(peak, keys, bytes_each):
    params = f"{{lr: 0.1, momentum: {keys['momentum']}}}"
    config = config_of(0, "fp32", f"optimizer={{type: SGD, params: {params}}}")
    assert peak(config, **in_backward(done=600))["optimizer"] == bytes_each * N


def test_muon_gathers_all_matrices_and_works_on_the_largest(peak):
    """Of 1,000 parameters, Muon trains 700, in matrices of 400 and 300."""
    muon = "optimizer={type: Muon, params: {lr: 0.1}}"
    keys = {"matrices": [300, 400], "left": LARGE}
    found = peak(config_of(1, "bf16", muon), **keys)
    assert found["optimizer"] == (12 - 4 * 0.7) * N / D
    assert found["gradients"] == 4 * N / D
    assert found["working space"] == 2 * (700 / D + 700 + 3 * 400)
    on_cpu = peak(config_of(1, "bf16", muon), "cpu", **keys)
    assert on_cpu["working space"] == 4 * (700 / D + 700 + 3 * 400)
    alone = peak(config_of(0, "fp32", muon), "cpu", **keys)
    assert alone["working space"] == 4 * (700 + 3 * 400)  # nothing to gather
