"""Test that plans, measurements and results on the pages for users are those of their records.

A record is a committed file, a table of the lab, or a config from which the number is computed
again. `test_figures_layouts_to_your_model.py` has the other figures of these pages.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from functools import cache

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from benchmarks.loss_memory import VOCABULARY
from benchmarks.plan.plan_time import PAGE
from megatron.config import load_config
from megatron.engine.build import plan_of
from megatron.engine.gpus import GPUS, gpu_named
from megatron.engine.training.speed import mean_keys
from megatron.parallel.loss import LOGITS_AT_ONCE
from megatron.plan.plan_text import GPT2_VOCABULARY
from megatron.plan.step import Step, measured_step
from megatron.plan.step_time import CALIBRATED, Cluster, step_time
from tests.helpers.paths import CONFIGS, ROOT
from tests.pages.figures.test_figures_layouts_to_your_model import (
    LLAMA,
    QUICKSTART,
    parameters,
    said,
    word,
)
from tests.pages.test_documented_grids import perplexities
from tests.pages.test_documented_numbers import assert_rounded, one_line, rows


@cache
def step_of(*overrides: str) -> Step:
    """Return a step of LLaMA 7B on 64 GPUs, from steps with one and two layers in each stage."""

    def config_with(layers: int):
        # fp16 has bf16's bytes. Without a GPU, tests plan fused attention in fp16 only.
        given = [*overrides, f"num_layers={layers}", "precision=fp16"]
        return load_config([CONFIGS / "recipes/llama_7B.yml"], given, world_size=64)

    stages = config_with(LLAMA["num_layers"]).parallel.pipe_parallel_size
    one, two = (measured_step(config_with(n * stages), GPT2_VOCABULARY, 0)
                for n in (1, 2))  # fmt: skip

    def of_all(one: int, two: int) -> int:
        return one + (LLAMA["num_layers"] // stages - 1) * (two - one)

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
    found = step_time(config, step_of(*given), shape, mean_keys(config), cluster)
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
    said("memory_and_speed", f"{layouts} {math.ceil(100 * off)}% of the measured memory")
    first, other = rows(PAGE, "The runs", "| rows ")
    names = rows(ROOT / "docs/memory_and_speed.md", "Plan a run", "| option ")[1]["meaning"]
    assert sorted(re.split(", | or ", names)) == sorted(GPUS)
    inside = f"In {other['within the interval']} of these {other['runs']} runs, the published"
    runs = f"calibrated on {first['runs']} published runs. The estimate was then compared with"
    said("memory_and_speed", inside, f"{runs} {other['runs']} other published runs:")


def test_measurements_of_the_lab():
    """Tables of the lab that are themselves the records of measurements."""
    lab = ROOT / "docs" / "lab" / "performance.md"
    logits = [row for row in rows(lab, "Memory of the loss") if row["precision"] == "fp32"][-1]
    *_, tokens, whole, pieces = logits.values()
    small = f"two small layers, a vocabulary of {VOCABULARY:,}, and {tokens} tokens in fp32."
    said("memory_and_speed", f"{small} The peak memory falls from {whole} to {pieces} (")
    text = one_line(ROOT / "docs/memory_and_speed.md")
    power = re.search("computes at most 2(\\S+) logits", text)[1]
    assert 2 ** int(unicodedata.normalize("NFKC", power)) == LOGITS_AT_ONCE
    row = rows(lab, "Saving beside training")[0]
    model, buffer, together, first, later, _ = row.values()
    size = float(model.partition("M")[0])
    waits = f"training waits {first} s for the first save, and {later} s for each later save"
    said("resuming", f"a synchronous save of a {size:.0f}M model takes {together} s.", waits)
    each = 1000 * float(buffer.removesuffix(" GB")) / size
    said("resuming", f"needs about {each:.0f} bytes of memory for each parameter")
    first_run = one_line(lab.with_name("measurements.md"))
    said("quickstart", "together " + re.search(r"took [\d.]+ minutes", first_run)[0])


def test_the_quickstart():
    c = QUICKSTART
    lengths, steps, batch = c.evaluation.eval_lengths, c.training.train_iters, c.batch
    tokens = f"{batch.train_batch_size} x {c.model.seq_length} tokens"
    size = f"{parameters(c, 1024) / 1e6:.1f} million parameters"
    said("quickstart", f"trains a model of {size} for {steps:,} steps of {tokens}, and evaluates")
    said("quickstart", f"evaluates it at {word(len(lengths))} lengths")
    said("quickstart", f"Every {c.training.log_interval} steps, the run", f"`global_step{steps}/`")
    ends = f"perplexity at {c.model.seq_length} (the training length) to {lengths[-1]:,} tokens |"
    said("quickstart", ends, f"at {lengths[-1] // c.model.seq_length} times that length.")
    n = c.evaluation.eval_context_baseline
    said("quickstart", f"pieces of {n} tokens, exactly {n} tokens before each prediction, or the "
         f"last {n} tokens in")  # fmt: skip
    curves = [*(ROOT / "docs/quickstart").glob("extrapolation_*.csv")]
    said("quickstart", f"shows {word(len(curves) - 1)} other embeddings on the same text")
    log = (ROOT / "docs/retrofit.md").read_text()
    before, now = map(float, re.search(r"tokens: ([\d.]+) as .*, ([\d.]+) now", log).groups())
    trained = int(re.search(r"global_step(\d+) \(finetune", log)[1])
    said("retrofit", f"for {trained:,} of the quickstart's {steps:,} steps.")
    said("retrofit", f"at the training length by {now - before:.4f} nats")


def test_the_results(repo_root):
    found, docs = perplexities(repo_root, "code"), ROOT / "docs"
    terms = perplexities(repo_root, "terms")["embedding"].nunique()
    model = CONFIGS / "paper/stand_in_model.yml"
    configs = {
        name: load_config([model, CONFIGS / f"pos_emb/{name}.yml"], ["data_path=none"])
        for name in found["embedding"].unique()
    }
    sizes = {f"{parameters(config, 1024) / 1e6:.1f}M" for config in configs.values()}
    said("results", f"small ({sizes.pop()} parameters)", f"compares {word(len(configs))} embed")
    length, seeds = configs["alibi"].model.seq_length, found.groupby("embedding")["seed"].nunique()
    said("results", f"The training length is {length} tokens", f"only the last {length} tokens")
    longest = found["length"].max()
    said("results", f"evaluated at up to {longest // length} times", f"may read {longest:,} tokens")
    said("results", f"over {seeds.min()} to {seeds.max()} seeds:", f"compares {word(terms)} emb")
    assert not sizes and seeds["alibi"] == seeds["kerple_log"]
    said("results", f"Each embedding has {word(seeds['alibi'])} seeds.")
    row = rows(docs / "results.md", "KERPLE and ALiBi")[0]
    gap = found.pivot_table("value", ["seed", "length"], "embedding")
    gap = np.log(gap["kerple_log"] / gap["alibi"]).dropna().unstack("length")
    change = gap[longest] - gap[length]
    numbers = re.findall(r"[+-][\d.]+", row["change, 128 to 8,192"])
    half = np.diff(np.log1p([float(each) / 100 for each in numbers[1:]]))[0] / 2
    level = 2 * stats.t.cdf(half / stats.sem(change), len(change) - 1) - 1
    said("results", f"`kerple_log` / `alibi`, with a {level:.0%} interval")
    doses = pd.read_csv(docs / "results/recipe_dose/verdicts.csv")["dose"]
    grid = yaml.safe_load((CONFIGS / "paper/stand_in.yml").read_text())
    said("results", f"for {doses.max():,} steps instead of {grid['variables']['steps']}.")
    timed = json.loads((ROOT / "benchmarks/results/attention_cpu/attention.json").read_text())
    said("results", f"attention at {timed['setting']['length']} positions, forward and backward")
