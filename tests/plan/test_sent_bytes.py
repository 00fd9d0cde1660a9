"""Count the bytes that DeepSpeed's collectives send in a step, beside those of the plan."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import prod
from multiprocessing import get_context

import pytest

from megatron.config import load_config
from megatron.plan.memory import peak_of
from megatron.plan.step_time import sent_per_step
from megatron.pretraining.run import train
from megatron.rehearsal.fake_ranks import play_all
from megatron.rehearsal.narrow import narrow
from tests.helpers.jobs import write_config, write_shards

BYTES = {"float32": 4, "bfloat16": 2}
KEYS = {
    "num_layers": 4, "hidden_size": 64, "seq_length": 64, "no_weight_tying": True,
    "precision": "bfloat16", "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2, "train_batch_size": None, "eval_iters": 0,
}  # fmt: skip


def sent(event):
    """Return the bytes that a rank of two sends as in a ring: half of a sum's are sent twice."""
    tensors = re.findall(r"(float32|bfloat16)\[([\d, ]*)\]", event.what)
    sizes = [BYTES[kind] * prod(map(int, shape.split(","))) for kind, shape in tensors if shape]
    if "gather" in event.op:
        return max(sizes, default=0) / 2
    return sum(sizes) if "reduce" in event.op else 0.0


@pytest.fixture(name="fresh", scope="module")
def _fresh():
    """Return a pool with its own process, because DeepSpeed keeps the groups of other tests."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


def first_rank(config, folder):
    """Return what rank 0 of two does in a rehearsed run."""
    players = play_all(partial(train, config), 2, 1, folder, 1)
    played = next(players)
    players.close()
    return played


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_plan_counts_what_deepspeed_sends(tmp_path, fresh, stage, fp32):
    config = write_config(tmp_path / "c.yml", write_shards(tmp_path), **KEYS, save=str(tmp_path))
    given = [f"zero_optimization.stage={stage}", f"fp32_allreduce={str(fp32).lower()}"]

    def load(*more):
        return load_config([config], [*given, *more], world_size=2)

    found = load(*narrow(load(), tmp_path), "gradient_accumulation_steps=2", "train_iters=1")
    played = fresh.submit(first_rank, found, tmp_path).result()
    assert not played.error
    step, _ = peak_of(found, 257, "cpu")
    planned = sent_per_step(found, step)["data"]
    # Sums of single numbers, such as the loss, and the weights' start values are not planned
    counted = sum(sent(e) for e in played.threads[0] if "broadcast" not in e.op)
    assert counted == pytest.approx(planned, rel=0.02)
