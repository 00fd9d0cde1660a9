"""Test that plans, measurements and results on the pages for users are those of their records.

A record is a committed file, a table of the lab, or a config from which the number is computed
again.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from benchmarks.loss_memory import VOCABULARY
from megatron.config import load_config
from megatron.engine.build import plan_of
from megatron.engine.gpus import GPUS, gpu_named
from megatron.engine.training.speed import mean_keys
from megatron.parallel.loss import LOGITS_AT_ONCE
from megatron.plan.plan_text import GPT2_VOCABULARY
from megatron.plan.step import Step, measured_step
from megatron.plan.step_time import CALIBRATED, Cluster, step_time
from tests.helpers.paths import CONFIGS, ROOT
from tests.model.published_sizes import parameters
from tests.pages.figures.held import (
    HAND_SCALE,
    LAB,
    QUICKSTART,
    RESULTS,
    assert_rounded,
    first_command,
    grid,
    one_line,
    perplexities,
    rows,
    says,
    word,
    yml,
)

LAYERS = yml("recipes/llama_7B.yml")["num_layers"]
NEAR_WAITING, LAUNCHES = "model_parallel_size=32", 7671
"""The last layout of the table, and the operations of its micro-batch that the CPU launches.

torch 2.13 launches so many. If another torch launches 10% more, the layout waits for the CPU, and
its planned time is 1.5% longer. So this time is computed from the number here. The times of the
other layouts are the same even with 50% more operations."""


@cache
def step_of(*overrides: str) -> Step:
    """Return a step of LLaMA 7B on 64 GPUs, from steps with one and two layers in each stage."""

    def config_with(layers: int):
        # fp16 has bf16's bytes. Without a GPU, tests plan fused attention in fp16 only.
        given = [*overrides, f"num_layers={layers}", "precision=fp16"]
        return load_config([CONFIGS / "recipes/llama_7B.yml"], given, world_size=64)

    stages = config_with(LAYERS).parallel.pipe_parallel_size
    one, two = (measured_step(config_with(n * stages), GPT2_VOCABULARY, 0)
                for n in (1, 2))  # fmt: skip

    def of_all(one: int, two: int) -> int:
        return one + (LAYERS // stages - 1) * (two - one)

    tensors = of_all(len(one.parameters), len(two.parameters))
    sizes = [of_all(one.size, two.size)] + [0] * (tensors - 1)  # only the sum counts
    sent = {name: of_all(one.sent[name], two.sent[name]) for name in one.sent}
    return Step(sizes, sent=sent, launches=of_all(one.launches, two.launches))


@pytest.mark.parametrize("n", range(4))
def test_planned_times(n):
    table = rows(ROOT / "docs/memory_and_speed.md", "Plan a run", "| layout")
    assert len(table) == 4
    layout, times, *parts = table[n].values()
    given = re.findall(r"-o (\w+=\d+)", layout)
    config = load_config([CONFIGS / "recipes/llama_7B.yml"], given, world_size=64)
    shape = plan_of(config, GPT2_VOCABULARY, device_type="cuda", eod=0).shape
    gpu = gpu_named("H100")
    cluster = Cluster(gpu, 8, gpu.network)
    step = step_of(*given)
    if NEAR_WAITING in given:
        assert step.launches == pytest.approx(LAUNCHES, rel=0.25)
        step = replace(step, launches=LAUNCHES)
    found = step_time(config, step, shape, mean_keys(config), cluster)
    expected = [found.total * x for x in (1, *CALIBRATED.interval)]
    expected += [found.compute, found.bubble, found.exposed]
    for text, value in zip([*re.findall(r"[\d.]+", times), *parts], expected, strict=True):
        assert_rounded(text, value)
    if "machines" in layout:
        assert f"over {config.parallel.model_parallel_size // 8} machines" in layout


def test_planned_and_measured():
    measured = json.loads((ROOT / "benchmarks/results/plan_memory.json").read_text())["rows"]
    off = max(abs(row["ratio"] - 1) for row in measured.values())
    layouts = f"In {len(measured)} layouts on a CPU, the planned memory was within"
    says("memory_and_speed", f"{layouts} {math.ceil(100 * off)}% of the measured memory")
    first, other = rows(LAB / "published_runs.md", "The runs", "| rows ")
    names = rows(ROOT / "docs/memory_and_speed.md", "Plan a run", "| option ")[1]["meaning"]
    assert sorted(re.split(", | or ", names)) == sorted(GPUS)
    inside = f"In {other['within the interval']} of these {other['runs']} runs, the published"
    runs = f"calibrated on {first['runs']} published runs. The estimate was then compared with"
    says("memory_and_speed", inside, f"{runs} {other['runs']} other published runs:")


def test_measurements_of_the_lab():
    """Tables of the lab that are themselves the records of measurements."""
    lab = LAB / "performance.md"
    logits = [row for row in rows(lab, "Memory of the loss") if row["precision"] == "fp32"][-1]
    *_, tokens, whole, pieces = logits.values()
    small = f"two small layers, a vocabulary of {VOCABULARY:,}, and {tokens} tokens in fp32."
    says("memory_and_speed", f"{small} The peak memory falls from {whole} to {pieces} (")
    text = one_line(ROOT / "docs/memory_and_speed.md")
    power = re.search("computes at most 2(\\S+) logits", text)[1]
    assert 2 ** int(unicodedata.normalize("NFKC", power)) == LOGITS_AT_ONCE
    row = rows(lab, "Saving beside training")[0]
    model, buffer, together, first, later, _ = row.values()
    size = float(model.partition("M")[0])
    waits = f"training waits {first} s for the first save, and {later} s for each later save"
    says("resuming", f"a synchronous save of a {size:.0f}M model takes {together} s.", waits)
    each = 1000 * float(buffer.removesuffix(" GB")) / size
    says("resuming", f"needs about {each:.0f} bytes of memory for each parameter")
    says("quickstart", f"together took {first_command()[0]} minutes")


def test_the_quickstart():
    c = QUICKSTART
    lengths, steps, batch = c.evaluation.eval_lengths, c.training.train_iters, c.batch
    tokens = f"{batch.train_batch_size} x {c.model.seq_length} tokens"
    size = f"{parameters(c, 1024)[0] / 1e6:.1f} million parameters"
    says("quickstart", f"trains a model of {size} for {steps:,} steps of {tokens}, and evaluates")
    says("quickstart", f"evaluates it at {word(len(lengths))} lengths")
    says("quickstart", f"Every {c.training.log_interval} steps, the run", f"`global_step{steps}/`")
    ends = f"perplexity at {c.model.seq_length} (the training length) to {lengths[-1]:,} tokens |"
    says("quickstart", ends, f"at {lengths[-1] // c.model.seq_length} times that length.")
    n = c.evaluation.eval_context_baseline
    says("quickstart", f"pieces of {n} tokens, exactly {n} tokens before each prediction, or the "
         f"last {n} tokens in")  # fmt: skip
    curves = [*(ROOT / "docs/quickstart").glob("extrapolation_*.csv")]
    says("quickstart", f"shows {word(len(curves) - 1)} other embeddings on the same text")
    trained = int(
        re.search(r"global_step(\d+) \(finetune", (ROOT / "docs/retrofit.md").read_text())[1]
    )
    says("retrofit", f"with a model of {trained:,} of the quickstart's {steps:,} steps")


def test_the_lengths_seeds_and_steps_of_the_comparison():
    found, trained = perplexities("code"), grid("stand_in").about.lengths[0]
    seeds, longest = found.groupby("embedding")["seed"].nunique(), found["length"].max()
    says("../README", f"sequences of {trained} tokens, and evaluated on up to {longest:,} tokens")
    says("../README", f"From {trained} to {longest:,} tokens, the perplexity")
    says("../README", f"each layer sees only the last {trained} tokens")
    says("../README", f"At {2048 // trained} times the training length, the perplexity")
    says("results", f"The training length is {trained} tokens", f"only the last {trained} tokens")
    says("results", f"may read {longest:,} tokens", f"at up to {longest // trained} times")
    some, most = seeds.min(), seeds.max()
    says("../README", f"one standard deviation over {some} to {most} seeds")
    says("results", f"over {some} to {most} seeds:")
    texts = [perplexities(text).groupby("embedding")["seed"].nunique()
             for _, text in HAND_SCALE]  # fmt: skip
    (count,) = {each[name] for each in texts for name in ("kerple_log", "alibi")}
    says("../README", f"LaTeX ({count} seeds each)")
    says("results", f"Each embedding has {word(count)} seeds.")
    steps = grid("stand_in").variables["steps"]
    dose = pd.read_csv(RESULTS / "recipe_dose" / "verdicts.csv")["dose"].max()
    says("../README", f"With [{dose:,} steps instead of {steps}]")
    says("results", f"for {dose:,} steps instead of {steps}.")


def test_the_results():
    found, terms = perplexities("code"), perplexities("terms")["embedding"].nunique()
    model = CONFIGS / "paper/stand_in_model.yml"
    configs = {
        name: load_config([model, CONFIGS / f"pos_emb/{name}.yml"], ["data_path=none"])
        for name in found["embedding"].unique()
    }
    (size,) = {f"{parameters(each, 1024)[0] / 1e6:.1f}M" for each in configs.values()}
    says("results", f"small ({size} parameters)", f"compares {word(len(configs))} embed")
    says("results", f"compares {word(terms)} emb")
    row = rows(ROOT / "docs" / "results.md", "KERPLE and ALiBi")[0]
    gap = found.pivot_table("value", ["seed", "length"], "embedding")
    gap = np.log(gap["kerple_log"] / gap["alibi"]).dropna().unstack("length")
    change = gap.iloc[:, -1] - gap.iloc[:, 0]
    numbers = re.findall(r"[+-][\d.]+", row["change, 128 to 8,192"])
    half = np.diff(np.log1p([float(each) / 100 for each in numbers[1:]]))[0] / 2
    level = 2 * stats.t.cdf(half / stats.sem(change), len(change) - 1) - 1
    says("results", f"`kerple_log` / `alibi`, with a {level:.0%} interval")
    timed = json.loads((ROOT / "benchmarks/results/attention_cpu/attention.json").read_text())
    says("results", f"attention at {timed['setting']['length']} positions, forward and backward")
