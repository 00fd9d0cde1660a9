"""Test the other figures of the lab's pages of results: lengths, seeds, steps, repeated values."""

from __future__ import annotations

import json
import math
import re

import pandas as pd
import pytest

from megatron.config import load_config
from megatron.evaluation.suite import pointer
from megatron.positional import load
from tests.helpers.paths import ROOT
from tests.model.published_sizes import parameters
from tests.pages.figures.held import (
    HAND_SCALE,
    LAB,
    QUICKSTART,
    RESULTS,
    and_list,
    first_command,
    grid,
    means,
    or_list,
    preparation_memory,
    rows,
    says,
    yml,
)

PAGE, MEASUREMENTS, FAR = "lab/measurements", LAB / "measurements.md", r"Does far text help\?"


def curve(name: str) -> pd.Series:
    """Return the perplexity of an embedding of the quickstart, by length."""
    file = ROOT / "docs" / "quickstart" / f"extrapolation_{name}.csv"
    return pd.read_csv(file).set_index("length").perplexity


def section(heading: str) -> str:
    text = (MEASUREMENTS).read_text().partition(f"# {heading}\n")[2]
    return re.sub(r"\n *", " ", re.split(r"\n##+ ", text)[0])


def test_the_quickstart():
    c, files = QUICKSTART, ROOT / "docs" / "quickstart"
    w, n = c.model.seq_length, c.evaluation.eval_context_baseline
    long, tokens = max(c.evaluation.eval_lengths), len(json.loads(
        (ROOT / c.data.vocab_file).read_text())["model"]["vocab"])  # fmt: skip
    every = pd.DataFrame({name: curve(name) for name in (
        "kerple_log", "rotary", "alibi", "rotary_kerple_log", "kerple_log_forget_gate", "fire",
        "sinusoidal")})  # fmt: skip
    log, fire, best = every["kerple_log"], every["fire"], every.idxmin(axis=1)
    gated = best.index[best == "kerple_log_forget_gate"]
    below = fire.index[fire < log]
    assert best[w] == "rotary_kerple_log" and set(gated) == set(best.index[1:])
    assert below.tolist() == best.index[: len(below)].tolist()
    twin = pd.read_csv(files / "suite" / "windowed_twin.csv").iloc[0]
    exact = pd.read_csv(files / "suite" / "exact_context.csv").iloc[0]
    for row in rows(MEASUREMENTS, "Perplexity by length"):
        assert int(row["× training length"]) * w == int(row["length"].replace(",", ""))
    at = f"{yml('quickstart.yml')['train_iters']:,} steps of"
    default, (fast, slow) = load("fire").length, first_command()
    says(
        PAGE,
        f"took {fast} minutes with", f"and {slow} on a slower one",
        f"The quickstart model ({parameters(QUICKSTART, 1024)[0] / 1e6:.1f}M parameters) was",
        f"trained for {at} {c.batch.train_batch_size} sequences at {w} tokens, on",
        f"in {tokens:,} BPE tokens.",
        f"falls with the length: at {long:,} it is",
        f"% below that at {w}. Nearly",
        f"[Attention beyond {w} tokens](#does-far-text-help) lowers the loss by {twin.value:.3f}"
        f" nats; by the other measure, a comparison with exactly {w} tokens of context, the gain is"
        f" unclear ({exact.value:.4f} [{exact.low:.4f}, {exact.high:.4f}]).",
        f"lowest perplexity from {gated[0]} on. `rotary + kerple_log` is the lowest at {w} and",
        f"below `kerple_log` up to {below[-1]}, and rises by",
        f"% from there to {long:,}. It ran",
        f"threshold L starts at {default}, the default for training at {default} tokens",
        f"such as `rpe`, were rescaled to {w}.",
        f"With exactly the {n} tokens before each scored token",
        f"above that with up to {long:,}. On text cut into pieces of {n} tokens",
        f"If each layer sees only the last {n} tokens",
        f"`kerple_log` with this model at length {w}, one seed",
        f"with exactly {n} tokens of context is above that at {long:,}.",
        f"| bits per byte at {w} | at {long:,} | perplexity at {long:,} / at {w} | {n} tokens |",
    )  # fmt: skip


def test_the_hand_scale_comparison():
    about, cells = grid("stand_in").about, grid("stand_in").cells
    model, mean = yml("paper/stand_in_model.yml"), means("code")
    w = model["seq_length"]
    shorter = {f"{100 * (1 - mean.loc[x, 2 * w] / mean.loc[x, w]):.0f}%" for x in (
        "kerple_log", "kerple_power", "alibi", "rpe")}  # fmt: skip
    took = [pd.read_csv(RESULTS / x / "cells.csv").seconds.sum() / 120 for x in ("lr", "code")]
    latex = pd.read_csv(RESULTS / "latex" / "cells.csv").seconds.sum() / 120
    (most,) = re.findall(r"take at most (\d+) minutes", (LAB / "plan.md").read_text())
    search = grid("stand_in_lr").about
    runs = pd.read_csv(RESULTS / "lr" / "results.csv").folder.nunique()
    last, power = about.lengths[-1], mean.loc["kerple_power"]
    assert power.is_monotonic_decreasing and len(about.axes["embedding"]) == 6
    assert set(pd.read_csv(RESULTS / "code" / "results.csv").query("embedding == 'rpe'").seed) == {
        1235, 1236, 1237}  # fmt: skip
    says(
        PAGE,
        f"trained at {w} tokens and evaluated at up to {last // w} times that length: {len(cells)}"
        " runs on two",
        f"`alibi` and `rpe` are {shorter.pop()} better at {2 * w} than at {w}: against them,"
        f" `rotary` is behind already at {2 * w}.",
        f"and still falls at {last:,}. In the paper",
        f"% above at {last:,}. The perplexity of `alibi` falls",
        f"and the model has {parameters(QUICKSTART, 1024)[0] / 1e6:.1f}M parameters, so",
        f"the test text is one, {model['eval_tokens']:,} tokens.",
        f"took {took[0]:.0f} and {took[1]:.0f} minutes, together {sum(took):.0f} instead of {most}",
        f"as prose, {latex:.0f} minutes beside other work",
        f"Perplexity at {w} on the validation text, after {search.variables['steps']} steps, with",
        f"The search had {runs} runs.",
        f"`kerple_power` needed no run at {search.axes['lr'][-1]}, because",
        f"still falls at {last // w} times the training length depends",
        f"how far `kerple_log` is below `alibi` at 1, {2048 // w} and {last // w} times the"
        f" training length, and the change from 1 to {last // w} times",
    )
    assert not shorter


@pytest.mark.parametrize(("heading", "folder"), HAND_SCALE)
def test_the_endpoints_are_those_of_the_grid(heading, folder):
    """Lengths, margins and seeds of the verdicts on each text."""
    first, second, (worse, within) = grid("stand_in").about.endpoints.values()
    mean, text = means(folder), section(heading)
    five, three = first.of["length"], second.than["length"]
    best = {name: f"{mean.loc[name].idxmin():,}" for name in ("rpe", "kerple_log")}
    long, (a, b) = int(worse.of["length"]), (second.of["length"], three)
    seeds = pd.read_csv(RESULTS / folder / "verdicts.csv").seeds.tolist()
    assert re.findall(r", (\d) seeds[,)]", text) == [str(each) for each in seeds]
    wanted = {
        "code": [
            f"`rotary` should be more than {second.by:g}% worse at {a} than at {b}; it is",
            f"`kerple_log` at {long:,} should be at most {within.by:g}% above its own best length,"
            f" {best['kerple_log']}; it",
            f"differs from `kerple_log` at no length significantly ({seeds[2]} seeds)",
        ],
        "prose": [
            f"`rotary` at {a} is a little better than at {b} (",
            f"more than {worse.by:g}% above their best length at {long:,}, but not the third",
            f"{best['kerple_log']} is the best length of `kerple_log` (",
            f"with every doubling up to {long:,}, where on code it rises from"
            f" {means('code').loc['kerple_log'].idxmin():,} on.",
            f"equal to `kerple_log` at {b} and {a}, and",
        ],
        "latex": [
            f"`rotary` at {a} is a little better than at {b} (",
            f"`kerple_log` at {long:,} is more than {within.by:g}% above its best length,"
            f" {best['kerple_log']} (",
            f"rises from {best['kerple_log']} on, and `alibi` falls up to {long:,}: it",
            f"below `alibi` at {int(five):,} on each",
            f"is never more than {second.by:g}% worse at twice",
        ],
    }[folder]
    if folder != "prose":
        wanted.append(f"`rpe` at {long:,} is more than {worse.by:g}% above its own best length,"
                      f" {best['rpe']} (")  # fmt: skip
    wanted.append(f"`kerple_log` is below `alibi` at {int(five):,} (")
    assert not [each for each in wanted if each not in text]


def test_the_gap_and_the_far_text():
    paper = json.loads((ROOT / "configs/paper/tables.json").read_text())["tables"]
    large, w = paper["xl-512"]["openwebtext2"], QUICKSTART.model.seq_length
    alibi, log = ([large[name][n] for n in ("8192", "16384")] for name in ("alibi", "kerple_log"))
    shortest = min(map(int, paper["small-512"]["github"]["alibi"]))
    matches = pd.read_csv(ROOT / "docs/quickstart/suite/pointer.csv").iloc[0]
    doses = pd.read_csv(RESULTS / "recipe_dose" / "verdicts.csv").dose
    longest = max(int(row["longest"].replace(",", "")) for row in rows(MEASUREMENTS, FAR))
    level = int(grid("stand_in").about.endpoints["P1"].of["length"])
    assert f"beyond {w}" == matches.matches and alibi[0][0] < log[0][0]
    says(
        PAGE,
        f"a level: `kerple_log` is below `alibi` at {level:,}. It is so",
        f"from {shortest} tokens to {8192 // shortest} times that length",
        f"`alibi` has {alibi[0][0]} ± {alibi[0][1]} at 8,192 and {alibi[1][0]} ± {alibi[1][1]}"
        f" at 16,384, and `kerple_log` {log[0][0]} ± {log[0][1]} and {log[1][0]} ± {log[1][1]}.",
        f"A model that reads {longest:,} tokens without",
        f"limited to the last {w} tokens. The gain is how much attention beyond {w} tokens lowers"
        f" the loss of the tokens beyond {w}, in",
        f"From {w} to {max(QUICKSTART.evaluation.eval_lengths):,} tokens, its loss falls",
        f"attention beyond {w} tokens explains",
        f"the same {or_list(pointer.ORDERS)} tokens before",
        f"From matches beyond {w} tokens it gains {matches.value:.3f} nats"
        f" [{matches.low:.3f}, {matches.high:.3f}] ([report]",
        f"after {doses.max():,} steps, `kerple_log` gains",
        f"nats from attention beyond {w} tokens",
        f"and after {doses.min()} steps it loses",
    )


def test_the_other_terms():
    mean, w = means("terms"), QUICKSTART.model.seq_length
    found = pd.read_csv(RESULTS / "terms" / "results.csv")
    seeds, longest = sorted(set(found.seed)), mean.columns[-1]
    bounded = mean.loc[["gaussian_mul", "kerple_power_mul", "gaussian", "gaussian3", "fire"]]
    start = next(n for n in mean.columns if (bounded.diff(axis=1).loc[:, n:] > 0).all(axis=None))
    assert len(rows(MEASUREMENTS, "Beyond the paper")) * len(seeds) == found.folder.nunique()
    says(
        PAGE,
        f"(#the-papers-comparison-at-hand-scale): {found.folder.nunique()} runs, two seeds"
        f" ({and_list(seeds)}), and the learning",
        f"improve with every doubling up to {longest:,}: learned slopes",
        f"get worse from {start} on.",
        f"`fire` started with L = {load('fire').length} on texts of {w} tokens",
        f"At {longest:,}, the mean of `sink + kerple_log`",
        f"The runs with seed {seeds[0]} were made twice",
    )


def test_backends_rounding_and_attention():
    about, model = grid("stand_in_backends").about, yml("paper/stand_in_model.yml")
    (margin,) = {each.by for each in about.endpoints.values()}
    files = [pd.read_csv(RESULTS / "rounding" / f"{name}.csv").set_index("length")
             for name in ("fp32", "bf16", "bf16_published")]  # fmt: skip
    (tokens,) = set(files[0].index * files[0].sequences)
    furthest = max((other.loss - files[0].loss).abs().max() for other in files[1:])
    report = json.loads((ROOT / "benchmarks/results/attention_cpu/attention.json").read_text())
    shape = report["setting"]
    rate = model["optimizer"]["params"]["lr"]
    says(
        PAGE,
        f"for {about.overrides['train_iters']} steps in fp32 at rate {rate}: five seeds, two",
        f"margin {margin:g}% of the loss on the test split",
        f"the same at {about.lengths[-1]:,} tokens (",
        f"(`kerple_log`, seed {grid('stand_in').about.seeds[0]}), evaluated by `eager` in both"
        f" ways and in fp32, on {tokens:,} tokens. Differences are in {1e-4:.4f} nats:",
        f"at most {100 * math.expm1(furthest):.2f}% of the perplexity",
        f"at {shape['length']} positions, {shape['heads']} heads of {shape['head_size']}, fp32",
    )


def test_the_preparation_of_data():
    (small, text), (large, more) = preparation_memory()
    found = pd.read_csv(ROOT / "benchmarks/results/data_prep_640.csv")
    ratio = found.set_index("path").ratio_to_per_document_1
    auto, gigatoken = (ratio[f"prepare_data.py, {name}"] for name in ("auto", "gigatoken"))
    says(
        PAGE,
        f"GPT-2 tokens from {text} of text",
        f"On {more} they are {auto:.1f} and {gigatoken:.0f} times as fast",
        f"Peak memory is {small} for {text} of text and {large} for {more}.",
        f"tables for [{text}](",
    )


def test_the_length_tasks():
    five = yml("tasks/embeddings.yml")
    tasks = {x.stem: yml(f"tasks/{x.name}") for x in (ROOT / "configs/tasks").glob("*.yml")}
    copy, addition, recall = (tasks[name] for name in ("copy", "addition", "mqar"))
    every, default = grid("length_tasks"), load_config([ROOT / "configs" / "tasks" / "copy.yml"])
    examples, first = default.evaluation.eval_examples, every.about.seeds[0]
    found = pd.read_csv(ROOT / "docs" / "length_tasks" / "crosses.csv")
    found = found.set_index(["metric", "task", "length", "embedding", "seed"]).value.sort_index()
    exact, token = found["exact"], found["token"]
    once = pd.read_csv(ROOT / "docs" / "length_tasks" / "results.csv").set_index(
        ["metric", "task", "length", "embedding"]).value  # fmt: skip
    sort = 100 * exact["sort", 20].xs(first, level="seed")
    far = (100 * exact["parity", 20].xs(first, level="seed") - 50).abs().max()
    same = {tasks[name]["init_method_std"] for name in ("mqar", "modular", "addition")}
    seeds = sorted(set(exact["mqar"].index.get_level_values("seed")))
    assert len(five["axes"]["embedding"]) == 5 and len(every.about.axes["embedding"]) == 11
    assert {*five["lengths"]} == {*copy["eval_lengths"]} and len(every.about.axes["task"]) == 7
    says(
        "lab/length_task_results",
        f"at lengths 1 to {copy['task_options']['max_length']} ([Experiments]",
        f"width {copy['hidden_size']} and takes {copy['train_iters']:,} steps of"
        f" {copy['train_micro_batch_size_per_gpu']} examples.",
        f"right, {examples} examples each",
        f"| length {' | '.join(map(str, five['lengths']))} |",
        f"at most {100 * 1.96 * math.sqrt(0.25 / examples):.1f} percentage points to either side",
        f"At length {five['lengths'][0]}, `copy` is not learnt to the end in"
        f" {copy['train_iters']:,} steps:",
        f"with one seed ({first}). Each",
        f"{and_list(copy['eval_lengths'])}, and for `addition`"
        f" {and_list(addition['eval_lengths'])}. Percent",
        f"the temperature of `log_n` ({sort['log_n+kerple_log']:.1f}%).",
        f"(`none`, {sort['none']:.1f}%) is far better",
        f"all are within {math.ceil(far)} points of that",
        f"right on every row at length {addition['eval_lengths'][0]}. ",
        f"`kerple_log` has {100 * token['sort', 40, 'kerple_log', first]:.1f}% of the tokens of"
        f" `sort` right at length 40 here, and"
        f" {100 * once['token', 'sort', 40, 'kerple_log']:.1f}% with the seed above.",
        f"trained with 1 to {recall['task_options']['max_length']} keys.",
        f"with the seeds {' / '.join(map(str, seeds))}, in the order of the means at"
        f" {recall['eval_lengths'][1]} keys",
        f"In these {recall['train_iters']:,} steps, a run",
        f"draw them with a deviation of {same.pop():g}. With the default of"
        f" {default.model.init_method_std:g} and",
        f"learnt `mqar` (seed {first}).",
        f"Most of its {len(every.cells)} runs are not",
    )
    assert not same
