"""Test that the plan of the arena says what its grids and its script do."""

from __future__ import annotations

import csv
import itertools
import json
import re

import pandas as pd

from megatron.evaluation.suite.intervals import FEWEST, LEVEL
from megatron.evaluation.suite.recall import NOTICEABLE
from tests.helpers.paths import CONFIGS, ROOT
from tests.pages.figures.held import constant, grid, says, word

LAB = ROOT / "docs" / "lab"
PAGE = "lab/plan_arena"
DOSES = pd.read_csv(ROOT / "docs/results/recipe_dose/verdicts.csv")


def families() -> list[dict[str, str]]:
    with (LAB / "tables" / "arena_families.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def axis(name: str, text: str) -> str:
    """The name of a method in a grid: `log_n+bam` for "log_n + bam with `temper_bias`"."""
    found = text.partition(" with ")[0].replace(" ", "")
    assert found in grid(name).about.axes["embedding"], text
    return found


def test_each_method_has_one_family_with_a_searched_rate():
    members = [axis("arena", each) for row in families() for each in row["methods"].split(", ")]
    assert sorted(members) == sorted(grid("arena").about.axes["embedding"])
    searched = [axis("arena_rates", row["searched with"]) for row in families()]
    assert searched == [*dict.fromkeys(searched)]
    assert sorted(searched) == sorted(grid("arena_rates").about.axes["embedding"])


def test_the_options_that_depend_on_a_length_are_those_of_the_training_length():
    for cell in grid("arena").cells:
        model = cell.config().model
        options = model.pos_emb_options
        if "fire" in cell.axes["embedding"]:
            assert options == {"length": model.seq_length}
        if "log_n" in cell.axes["embedding"]:
            assert options["log_n"]["length"] == model.seq_length
            assert ("bam" in model.pos_emb) == bool(options["log_n"].get("temper_bias"))
        assert model.rpe_max_distance * 4 == model.seq_length


def test_each_method_has_the_rate_that_was_best_for_its_family():
    found = pd.read_csv(ROOT / "docs/results/arena_rates/results.csv")
    found = found[(found.metric == "perplexity") & (found.length == 128)]
    assert len(found) == len(grid("arena_rates").cells)
    of_rate = found.pivot(index="embedding", columns="lr", values="value")
    rates = {name: float(name) for name in grid("arena_rates").about.axes["lr"]}
    with (LAB / "tables" / "arena_rates.csv").open(newline="") as file:
        table = {row.pop("family"): row for row in csv.DictReader(file)}
    cells = {cell.axes["embedding"]: cell.config() for cell in grid("arena").cells}
    taken = []
    for row in families():
        tried = of_rate.loc[axis("arena_rates", row["searched with"])]
        best = min(rates, key=lambda name: (tried[rates[name]], rates[name]))
        shown = {name: f"{tried[rate]:.2f}" for name, rate in rates.items()}
        assert table[row["family"]] == shown | {"taken": best}
        for each in row["methods"].split(", "):
            assert cells[axis("arena", each)].optimizer.lr == rates[best], each
        taken.append(best)
    assert len(taken) == len(table) == 13 and taken.count("16e-3") == 12
    gaussian = of_rate.loc["gaussian"]
    says(
        PAGE,
        "Twelve families take 16e-3. The Gaussian takes 32e-3, which is"
        f" {gaussian[0.016] - gaussian[0.032]:.2f} better than 16e-3. It may prefer",
    )


def test_the_plan_has_the_figures_of_its_grids():
    arena, rates = grid("arena"), grid("arena_rates")
    config = arena.cells[0].config()
    w, batch = config.model.seq_length, config.batch.train_batch_size
    steps, few = int(arena.variables["steps"]), int(rates.variables["steps"])
    methods, seeds = len(arena.about.axes["embedding"]), arena.about.seeds
    longest, tried = max(arena.about.lengths), rates.about.axes["lr"]
    sums = [name for name in arena.about.axes["embedding"] if "+" in name]
    gains = DOSES[DOSES.embedding == "kerple_log"].set_index("dose").gain
    assert len(sums) == 5 and gains[700] < 0 and steps == 4 * few
    assert len(seeds) == constant("docs/lab/arena.py", "SEEDS") == 3
    says(
        PAGE,
        f"after {gains.index[0]} steps its windowed twin is better, after {steps:,} steps distant"
        f" text gains {gains[steps]:.3f} nats, after 2,800 steps {gains[2800]:.3f}.",
        f"The arena takes {steps:,} steps, because more steps for {methods} methods do not",
        f"a gain after {steps:,} steps is not certain",
        f"`length` of `fire` and `log_n` is {w}, and `rpe_max_distance` is"
        f" {config.model.rpe_max_distance}, a quarter of it, as in the paper.",
        f"{tried[0]}, {tried[1]} and {tried[2]}, {few} steps, one seed ({rates.about.seeds[0]})",
        f"the validation split at {w} tokens is taken",
        f"the best may be {tried[0]} or {tried[-1]}. Of two",
        f"{few} steps are a quarter of the arena's, so the rate need not be the best for {steps:,}",
        f"{methods} methods, seeds {seeds[0]} to {seeds[-1]}, which",
        f"W = {w}, {w * batch:,} tokens a step, bf16, Muon), with {steps:,} steps.",
        f"on targets with more than {w} tokens before them, in sequences of {longest:,} tokens |",
        f"finds beyond {w} tokens; only for methods",
        f"perplexity at {longest:,} tokens divided by that at {w}, on",
        f"| level | logarithm of the perplexity at {w} tokens |",
        f"its rate was searched with one member of its family, for {few} steps and one seed",
        f"a window of {w} tokens each, the twin itself reaches back about"
        f" {config.model.num_layers * w // 100 * 100} tokens.",
        f"| 1 | {len(rates.cells)} of {few} steps |",
        f"| 2 | {len(arena.cells)} of {steps:,} steps |",
        f"| 3 | {len(arena.cells)} measured |",
        f"through {word(config.model.num_layers)} layers",
    )


def test_the_labels_and_tests_of_the_plan():
    arena = grid("arena")
    w, steps = arena.cells[0].config().model.seq_length, int(arena.variables["steps"])
    methods = len(arena.about.axes["embedding"])
    scored = round(constant("docs/lab/arena.py", "EXACT_TOKENS") / w, -2)
    of_dose = pd.read_csv(ROOT / "docs/results/recipe_dose/recipes.csv").query("dose == @steps")
    deviations = of_dose.groupby("embedding").gain.std()
    says(
        PAGE,
        "its own Holm correction at 5%:",
        f"With {word(len(arena.about.seeds))} seeds, a t test has two degrees of freedom",
        f"of {methods} p values, the smallest must be below {0.05 / methods:.4f}.",
        f"mean loss of a token after exactly {w} tokens, minus",
        f"on about {scored:,.0f} such tokens",
        f"after {steps:,} steps, the standard deviation of the gain was"
        f" {deviations['kerple_log']:.4f} with `kerple_log` and {deviations['alibi']:.4f} with",
        f"If a split has fewer than {word(FEWEST)} documents, there are no intervals",
        f"their gain is above {NOTICEABLE} nats by its whole interval",
        f"is labelled *gains* with a probability of nominally {(100 - LEVEL) / 2:g}%.",
    )
    yarn = pd.read_csv(ROOT / "docs/results/retrofit/retrofit.csv").query("method == 'yarn'")
    assert (yarn.gain_high < 0).all() and len(yarn) == 3  # "one method loses against its twin"
    assert {len(json.loads(each)) for each in yarn["copy"]} == {9}


TABLES = json.loads((CONFIGS / "paper" / "tables.json").read_text())["tables"]


def on_corpora(table: str, times: int, lower: str, higher: str) -> str | None:
    """Return on how many corpora of a table of the paper a claim holds, at `times` 512 tokens."""
    lengths = {"128": "512", "2048": str(512 * times)}

    def value(rows, text: str) -> float:
        name, _, at = text.removeprefix("change of ").partition(" at ")
        values = {each: rows[name][found][0] for each, found in lengths.items()}
        return values[at] if at else values["2048"] / values["128"]

    try:
        holds = [value(rows, lower) < value(rows, higher) for rows in TABLES[table].values()]
    except KeyError:  # the table has no such method or length
        return None
    return f"{sum(holds)} of {len(holds)}"


def test_the_claims_are_all_orders_of_the_papers_tables_that_the_plan_names():
    """The four embeddings in pairs, methods that rise, and kernels against `kerple_log`."""
    of_table = {name: grid(f"table{name}").about.axes["embedding"] for name in (3, 5, 6)}
    four = [name for name in of_table[3] if name not in ("rotary", "sinusoidal")]
    kernels = [(n, name) for n in (5, 6) for name in of_table[n] if name not in of_table[3]]
    possible = [
        (3, lower.format(a), higher.format(b))
        for lower, higher in (("{} at 2048",) * 2, ("{} at 128",) * 2, ("change of {}",) * 2)
        for a, b in itertools.permutations(four, 2)
    ]
    rises = [(3, name) for name in of_table[3]] + kernels
    possible += [(n, f"{name} at 128", f"{name} at 2048") for n, name in rises]
    possible += [(n, "kerple_log at 2048", f"{name} at 2048") for n, name in kernels]
    wanted = {
        (f"Table {n}", *sides)
        for n, *sides in possible
        if on_corpora("small-512", 16, *sides) == "3 of 3"
    }
    with (LAB / "tables" / "arena_claims.csv").open(newline="") as file:
        *claims, figure = csv.DictReader(file)
    assert len(four) == 4 and figure["in the paper"] == "Figure 5"
    assert len(claims) == len(wanted) == int(figure["claim"]) - 1
    for number, claim in enumerate(claims, 1):
        sides = claim["lower"], claim["higher"]
        assert int(claim["claim"]) == number and (claim["in the paper"], *sides) in wanted
        at_32 = (
            on_corpora("small-512", 32, *sides) if "2048" in str(sides) or "of" in sides[0] else ""
        )
        assert claim["at 32 times"] == (at_32 or ""), claim
        assert claim["1.3B parameters"] == (on_corpora("xl-512", 16, *sides) or ""), claim
    arena = grid("arena")
    longest, trained = max(arena.about.lengths), arena.cells[0].config().model.seq_length
    assert longest == 16 * trained
    seeds = len(arena.about.seeds)
    says(
        PAGE,
        f"Claims 1 to {len(claims)} are orders",
        f"Claim {len(claims) + 1} is that of Figure 5",
        f"16 times that: 512 and {16 * 512:,} tokens there, {trained} and {longest:,} here.",
        f"each of {word(seeds)} pairs on code",
        f"with probability 1/{2**seeds}, and contradicts it with 1/{2**seeds}.",
        f"With {len(claims) + 1} such claims, {word((len(claims) + 1) // 2**seeds)} of each",
    )


def test_the_other_text():
    arena, paper = grid("arena"), grid("table3").about.axes["embedding"]
    seed, steps = arena.about.seeds[0], int(arena.variables["steps"])
    with (LAB / "tables" / "arena_hours.csv").open(newline="") as file:
        *_, given = csv.DictReader(file)
    page = (LAB / "plan_arena.md").read_text()
    hours = sum(float(re.findall(rf"\| {n} \| 72 .* \| ([\d.]+) \|", page)[0]) for n in (2, 3))
    most = 2 * (len(paper) + 5)
    assert given == {
        "step": "5", "runs": f"at most {most} of {steps:,} steps, measured",
        "hours of two cores": f"{hours * most / len(arena.cells):.1f}",
    }  # fmt: skip
    assert {*paper} < {*arena.about.axes["embedding"]}
    assert constant("docs/lab/arena_texts.py", "PAPER") == [*paper]
    assert constant("docs/lab/arena_texts.py", "SEED") == seed
    assert constant("docs/lab/arena_texts.py", "BEST") == 5
    says(
        PAGE,
        f"the paper's {word(len(paper))} embeddings ({', '.join(f'`{name}`' for name in paper)})",
        f"The seed is {seed} alone",
        f"gain of the seeds {seed + 1} and {seed + 2}, among",
        "and the five with the highest mean smaller gain of",
        f"--only METHOD-{seed}",
    )
