"""Test that the figures of the lab's plans are those of the grids, configs and files."""

from __future__ import annotations

import json
import math
import re

import pandas as pd
import pytest

from benchmarks.attention import parser
from benchmarks.host import launch_time
from benchmarks.plan.plan_time import CALIBRATED, FIT, MISS, config_of, measured, runs
from megatron.engine.gpus import gpu_named
from megatron.engine.model_shape import shape_of
from megatron.engine.training.speed import flops_per_token, keys_per_query
from megatron.evaluation.suite import pointer
from megatron.plan.plan_text import USABLE
from tests.helpers.paths import ROOT
from tests.model.published_sizes import PYTHIA
from tests.pages.figures.held import LAB, RESULTS, and_list, constant, grid, rows, says, yml

MODEL = yml("paper/stand_in_model.yml")
RUNS = {row["run"]: row for row in runs()}


def rate(name: str, embedding: str) -> str:
    """Return the learning rate of an embedding in a grid, as the grid writes it."""
    text = (ROOT / f"configs/paper/{name}.yml").read_text()
    found = re.findall(rf"  {embedding}:\s+{{?overrides: {{optimizer.params.lr: (\w+-\d)}}", text)
    return found[0] if found else MODEL["optimizer"]["params"]["lr"]


def test_the_plan_has_the_figures_of_its_grid():
    about, cells = grid("stand_in").about, grid("stand_in").cells
    w, five, lengths = MODEL["seq_length"], about.seeds, about.lengths
    some = sorted({cell.seed for cell in cells if cell.axes["embedding"] == "rpe"})
    first, second, (worse, within) = about.endpoints.values()
    long = int(first.of["length"])
    rotary = pd.read_csv(ROOT / "docs/quickstart/extrapolation_rotary.csv")
    better = rotary.loc[rotary.perplexity.idxmin()]
    assert MODEL["max_position_embeddings"] == w and len(some) == 3
    assert {second.than["length"]} == {str(w)} and worse.of["length"] == within.of["length"]
    says(
        "lab/plan",
        f"stand_in.yml): {len(cells)} runs |",
        f"split {MODEL['split']}; the endpoints",
        f"BPE of {about.tokenizer.size:,} tokens, trained on the same library",
        f"{MODEL['num_layers']} layers, width {MODEL['hidden_size']}, "
        f"{MODEL['num_attention_heads']} heads",
        f"length {w}, batch {MODEL['train_micro_batch_size_per_gpu']}, the same number of steps",
        f"`rpe_max_distance` | {MODEL['rpe_max_distance']}: in the proportion of the paper's "
        f"{MODEL['rpe_max_distance'] * 512 // w} at length 512.",
        f"{lengths[0]} to {lengths[-1]:,} (1 to {lengths[-1] // w} times the training length), "
        f"{MODEL['eval_tokens']:,} target tokens each",
        f"{five[0]} to {five[-1]} for `kerple_log`, `kerple_power` and `alibi`; {some[0]} to "
        f"{some[-1]} for `rpe` (T5)",
        f"paired t tests at {about.alpha:.0%}, corrected",
        f"`alibi` at {long:,} ({long // w} times the training length) | {len(five)} |",
        f"at {second.of['length']} is more than {second.by:g}% above itself at {w} | {len(some)} |",
        f"at {int(worse.of['length']):,}, `rpe` is more than {worse.by:g}% above",
        f"within {within.by:g}% of its own; both must hold | {len(some)}, {len(five)} |",
        f"{MODEL['train_iters']:,} is the default.",
        f"evaluation. {about.variables['steps']} steps: ",
        f"All {len(cells)} runs are run once.",
        f"Muon with batches of {MODEL['train_micro_batch_size_per_gpu']} and"
        f" {about.tokenizer.size:,} tokens gave",
        f"Of lengths beyond {w}, only those trials",
        f"at lengths up to {rotary.length.max():,} with this recipe",
        f"`rotary` was better at {better.length:g} than at {w} there, against P2.",
        f"evaluated in both ways and in fp32, at {lengths[0]} to {lengths[-1]:,}.",
    )


def test_the_plan_has_the_figures_of_the_search_and_of_the_backends():
    search, backends = grid("stand_in_lr"), grid("stand_in_backends")
    found = pd.read_csv(RESULTS / "lr" / "results.csv")
    names = search.about.axes["embedding"]
    *planned, last = search.about.axes["lr"]
    best = {name: rate("stand_in", name) for name in names}
    (margin,) = {each.by for each in backends.about.endpoints.values()}
    lengths, w = backends.about.lengths, MODEL["seq_length"]
    smallest, tried = float(planned[0]) / 2, len(names) * len(planned)
    assert {rate for name, rate in best.items() if name != "kerple_power"} == {"16e-3"}
    assert int(search.about.variables["steps"]) * 2 == int(
        grid("stand_in").about.variables["steps"]
    )
    says(
        "lab/plan",
        f"rates {and_list(planned)}, half the steps, seed {search.about.seeds[0]} (which",
        f"does not use), {tried} runs. The rate with the lowest validation perplexity at length"
        f" {w} is taken",
        f"the next rate ({smallest * 1e3:g}e-3 or {last}) is tried once.",
        f"{rate('recipe_constant', 'alibi')} stands there until then.",
        f"{best['kerple_power']} for `kerple_power`; {best['alibi']} for the five others, all of"
        f" them worse at {last}. {found.folder.nunique()} runs.",
        f"`blocked` against `eager`, {len(backends.about.seeds)} seeds, "
        f"{backends.about.overrides['train_iters']} steps, equal within {margin:g}% of the loss"
        f" at lengths {lengths[0]} and {lengths[1]:,}, by two",
    )


def test_the_plan_of_recipes_has_the_figures_of_its_grids():
    screen, dose, constant_rate = map(grid, ("recipe_screen", "recipe_dose", "recipe_constant"))
    steps, batch = int(screen.variables["steps"]), MODEL["train_micro_batch_size_per_gpu"]
    w, long = MODEL["seq_length"], screen.about.axes["recipe"]["long"].overrides["seq_length"]
    doses = [int(each) for each in dose.about.axes["dose"]]
    warm_up = round(MODEL["warmup"] * constant_rate.about.overrides["lr_decay_iters"])
    last = dose.about.overrides["wsd_decay_ratio"]
    text = (ROOT / "configs/paper/recipe_screen.yml").read_text()
    (recall,) = re.findall(r"# (\d+%) of the tokens", text)
    code = (LAB / "recipe.py").read_text()
    (p,), (share,) = (
        re.findall(x, code) for x in (r"p < ([\d.]+) ", r"share.mean\(\) >= ([\d.]+)")
    )
    seeds, times = dose.about.seeds, constant("docs/lab/recipe.py", "TIMES")[-1]
    for name, value in zip(dose.about.axes["dose"], dose.about.axes["dose"].values(), strict=True):
        assert value.overrides["load"].endswith(f"global_step{round((1 - last) * int(name))}")
    assert warm_up == round(MODEL["warmup"] * steps) and constant_rate.about.seeds == seeds
    says(
        "lab/plan_recipe",
        f"in sequences of {times} W tokens; 95% interval",
        f"(orders {and_list(pointer.ORDERS)}, mixing",
        f"perplexity at {times} W divided by perplexity at W",
        f"{len(screen.cells)} runs of {steps:,} steps of {batch * w:,} tokens, one seed"
        f" ({screen.about.seeds[0]}), measured",
        f"| short | {w} |", f"| short_recall | {w} | the same, and documents that need recall",
        f"recall_text.py`): {recall} of the training tokens |",
        f"| long | {long} |", f"| long_recall | {long} |",
        f"(bf16, Muon at {rate('recipe_constant', 'alibi')})",
        f"seeds {seeds[0]} to {seeds[-1]} (the screening",
        f"{and_list(f'{x:,}' for x in doses)} steps;",
        f"after its first four runs (training length {w}) had",
        f"few documents of {times * long:,} tokens. The recipes with W = {long} may",
        f"from its checkpoint at {1 - last:.0%} of a dose, a branch decays the rate to"
        f" {dose.about.overrides['min_lr']:g} over the last {last:.0%}. Rates:"
        f" {rate('recipe_constant', 'alibi')} for all but `rpe`"
        f" ({rate('recipe_constant', 'rpe')}, which",
        f"`kerple_power`'s was {rate('stand_in', 'kerple_power')})",
        f"all runs warm up for {warm_up} steps, as",
        f"which decays over the last {last:.0%} of its steps",
        f"The doses up to {doses[-1]:,} steps are run first.",
        f"At one of the doses up to {doses[-1]:,} steps, for",
        f"at all doses up to {doses[-1]:,} steps, test split",
        f"R1 needs p < {100 * float(p):g}%", f"mean share is at least {float(share):.0%}.",
        f"the pointer finds, not {float(share):.0%}.",
        f"{rate('recipe_constant', 'alibi')} was not the best rate",
        f"({rate('stand_in', 'alibi')} was, at {grid('stand_in').variables['steps']} steps), so",
        f"| step 1 | {len(screen.cells)} of {steps:,} steps |",
    )  # fmt: skip


def test_the_plan_of_recipes_has_the_figures_of_its_results():
    screen = pd.read_csv(RESULTS / "recipe_screen" / "recipes.csv")
    short, long = (screen[screen.recipe.str.startswith(x)] for x in ("short", "long"))
    largest, smallest = (screen.loc[f(screen.share)] for f in (pd.Series.idxmax, pd.Series.idxmin))
    dose = pd.read_csv(RESULTS / "recipe_dose" / "recipes.csv")
    dose = dose[dose.embedding == "kerple_log"].groupby("dose")
    first, last = (dose.get_group(n) for n in (min(dose.groups), max(dose.groups)))
    twin = pd.read_csv(ROOT / "docs/quickstart/suite/windowed_twin.csv").iloc[0]
    w, further = short.W.iloc[0], long.W.iloc[0]
    few, more = ({*each.documents} for each in (long, short))
    assert (largest.embedding, smallest.embedding) == ("kerple_log", "alibi")
    assert largest.W == smallest.W == further and few == {3}
    spoken = [f"{a.headroom.min():.2f} to {a.headroom.max():.2f}" for a in (long, short)]
    assert (last.gain_low > 0).all() and (first.gain < 0).all()
    shown = pd.read_csv(RESULTS / "recipe_dose" / "verdicts.csv").query("R1").set_index("embedding")
    lowest = min(dose.get_group(n).gain_low.min() for n in shown.dose["kerple_log"])
    says(
        "lab/plan_recipe",
        f"attention beyond {w} tokens gains {twin.value:.3f} nats in the quickstart's",
        f"W = {further} have no interval, because the split has three documents of"
        f" {further * 16:,} tokens",
        f"with W = {w}, the shares are lower",
        f"With W = {further}, they go with the largest share of all (`kerple_log`,"
        f" {largest.share:.3f}) and with the smallest (`alibi`, {smallest.share:.3f}). A model"
        f" with W = {further} was measured beyond {further} tokens, on {few.pop()} documents"
        f" instead of {more.pop()}: its headroom is {spoken[0]} nats, instead of {spoken[1]}.",
        f"the gain of {max(dose.groups):,} steps is the same in all three seeds "
        f"({last.gain.min():.4f} to {last.gain.max():.4f} nats), and it excludes",
        f"they take {last.share.mean():.0%} of what the pointer finds",
        f"where R1 holds for `kerple_log`, the lowest of their lower ends is {lowest:.3f} nats.",
        f"(from {first.headroom.mean():.3f} to {last.headroom.mean():.3f} nats)",
        f"A model of {min(dose.groups)} steps is worse than its windowed twin, although "
        f"its perplexity falls by {-first.change.mean():.0%} with the length",
    )
    shares = screen.groupby("recipe").share.mean().sort_values()
    (enough,) = re.findall(r"least (\d+)% of the largest", (LAB / "plan_recipe.md").read_text())
    assert shares.iloc[-2] < float(enough) / 100 * shares.iloc[-1]
    (pilot,) = re.findall(r"\(([\d.]+k) tokens/s per core\)", (LAB / "plan.md").read_text())
    tokens = f"{pilot} tokens a second and core in bf16 in the first study"
    says("lab/plan_recipe", f"No other recipe has {enough}% of its share.", tokens)


def test_what_is_to_be_measured_on_a_gpu():
    fused = grid("stand_in_fused")
    least = min(fused.about.lengths)
    (margin,) = {each.by for each in fused.about.endpoints.values()}
    minutes = parser().get_default("minutes")
    size = PYTHIA["small", 128][0]
    forward, both = launch_time.GOALS.values()
    counted = pd.read_csv(ROOT / "tools" / "compiled_kernels.csv")
    blackwell = counted[counted.target.isin(["sm_100", "sm_120"])]
    assert {*blackwell.dtype} == {"bf16"} and {*blackwell.dropout} == {0}
    assert {*blackwell.group} == {1}
    assert len(fused.cells) == 10 and len(fused.about.seeds) == 5
    says(
        "lab/gpu_measurements",
        f"about {math.ceil(minutes)} minutes at most. (`--minutes {minutes:g}` is the default",
        f"({minutes:g} minutes at most; rows",
        f"The {size / 1e6:.0f}M model in bf16",
        f"Ten runs of {fused.about.overrides['train_iters']} steps, in bf16",
        f"margin of {margin:g}% of the loss at lengths {least} and {max(fused.about.lengths):,}.",
        f"The goals are {forward} µs forward, and {both} µs forward and backward.",
        f"{blackwell.kernel.nunique()} kernels in bf16, head sizes"
        f" {and_list(sorted({*blackwell.head_size}))}, without",
    )


def test_planned_and_measured_memory():
    report = json.loads((ROOT / "benchmarks" / "results" / "plan_memory.json").read_text())
    shown = rows(LAB / "plans_and_rehearsals.md", "Planned and measured memory")
    millions = max(row["parameters"] for row in report["rows"].values()) / 1e6
    says("lab/plans_and_rehearsals", f"| layout ({millions:.0f} million parameters, two steps) |")
    says("lab/plans_and_rehearsals", f"tensors may fill {USABLE:.0%} of the GPU")
    assert len(shown) == len(report["rows"])
    for cells, (layout, row) in zip(shown, report["rows"].items(), strict=True):
        sizes = [f"{row[key] / 1e6:,.0f}" for key in ("planned", "measured")]
        assert [*cells.values()] == [layout, *sizes, f"{row['planned'] / row['measured']:.3f}"]


def test_planned_and_published_hours():
    """The planned hours are recomputed from the number of operations; the memory is not."""
    shown = rows(LAB / "plans_and_rehearsals.md", "Planned and published hours")
    given = next(name for name in shown[0] if "--mfu" in name)
    mfu, most = float(given.split()[-1].strip("`")), next(x for x in shown[0] if "GiB" in x)
    vocabularies = set()
    for cells in shown:
        row = RUNS[cells["run"].partition(" (")[0]]
        config, vocabulary = config_of(row), int(row["vocab"])
        flop = flops_per_token(shape_of(config, vocabulary), keys_per_query(config))
        steps = int(row["unit"].split("/")[1].split()[0])
        tokens = int(row["global_batch"]) * int(row["sequence"]) * steps
        gpu, published = gpu_named(row["gpu"]), int(row["value"])
        hours = tokens * flop / (gpu.rate16 * 1e12 * mfu) / 3600
        assert cells["GPUs"] == row["gpus"] and cells["GPU hours published"] == f"{published:,}"
        assert cells[given] == f"{hours:,.0f}" and measured(row) > 0
        assert cells["MFU of the published hours"] == f"{hours * mfu / published:.3f}"
        vocabularies.add(vocabulary)
        fills = int(USABLE * gpu.memory)
    assert f" {fills} that may be filled" in most
    neox = PYTHIA["20B", 256][0]
    small, large = sorted(vocabularies)
    says(
        "lab/plans_and_rehearsals",
        f"on A100 of {gpu.memory:.0f} GB, planned",
        f"padded vocabularies of {small:,} (12B: {large:,}) and",
        f"{mfu:g} of the peak are {mfu * gpu.rate16:.0f} TFLOP/s",
        f"the published {neox:,} parameters of GPT-NeoX-20B",
    )


def test_the_page_of_published_runs():
    code = (ROOT / "benchmarks" / "plan" / "plan_time.py").read_text()
    (minutes,) = re.findall(r"the command takes about (\d) minutes", code)
    cluster, scientists = RUNS["Megatron 175B TP8 PP12 1536"], RUNS["bigscience BLOOM-176B"]
    turing = [row for name, row in RUNS.items() if name.startswith("Megatron-Turing")]
    assert len({(row["tp"], row["pp"]) for row in turing}) == 1 and len(FIT) == 6
    few, many = (int(row["gpus"]) for row in turing)
    (kind,) = {row["gpu"] for row in turing}
    says(
        "lab/published_runs",
        f"{len(RUNS)} published runs, planned on",
        f"{minutes} minutes on two cores of an AMD EPYC",
        f"misses by more than {MISS:.0%} counts as {MISS:.0%} in the calibration",
        f"eight links of {int(cluster['network_gbps']) // 8} Gbit/s for each machine",
        f"GPUs of {gpu_named(kind).memory:.0f} GB, as Microsoft's",
        f"Its {few:,} GPUs have the layout of its {many:,}.",
        f"four Omni-Path links are stated, and {int(scientists['network_gbps'])} Gbit/s",
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_published_run_has_the_figures_of_its_file(name):
    """What is planned fits the other cells; the test of the plan plans a few runs again."""
    table = rows(LAB / "published_runs.md", "The runs", "| run ")
    row = next(each for each in table if each["run"] == name)
    source, (low, high) = RUNS[name], CALIBRATED.interval
    keys = ("gpus", "gpu", "tp", "pp", "dp", "zero", "micro_batch", "recompute")
    seconds, total = measured(source), float(row["planned s"])
    assert [*row.values()][:10] == [row["run"], *(source[key] for key in keys), f"{seconds:.3g}"]
    half = 0.5 * 10 ** (math.floor(math.log10(total)) - 2)
    for shown, share in zip(row["interval"].split(" to "), (low, high), strict=True):
        unit = 10.0 ** (math.floor(math.log10(float(shown))) - 2)
        assert abs(float(shown) - share * total) <= share * half + unit / 2 + 1e-9
    error = float(row["error"].strip("%"))
    assert abs(error - 100 * (total / seconds - 1)) <= 0.5 + 100 * half / seconds
    shares = sum(int(row[key]) for key in ("compute", "bubble", "exposed"))
    assert shares <= 101 and row["rows"] == source["split"]
