"""Test that the plan of the arena says what its grids and its script do."""

from __future__ import annotations

import csv
import json
import math
import re

import pandas as pd

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
    harmed = constant("docs/lab/arena.py", "HARMED_GAIN")
    (rise,) = re.findall(r"HARMED_RISE = math.log\(1\.(\d+)\)", (LAB / "arena.py").read_text())
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
        f"`length` of `fire` and `log_n` is {w}, and T5's last bucket begins at"
        f" {config.model.rpe_max_distance}, a quarter",
        f"{tried[0]}, {tried[1]} and {tried[2]}, {few} steps, one seed ({rates.about.seeds[0]})",
        f"the validation split at {w} tokens is taken",
        f"the best may be {tried[0]} or {tried[-1]}. Of two",
        f"{few} steps are a quarter of the arena's, so the rate need not be the best for {steps:,}",
        f"{methods} methods, seeds {seeds[0]} to {seeds[-1]}, which",
        f"W = {w}, {w * batch:,} tokens a step, bf16, Muon), with {steps:,} steps.",
        f"on targets with more than {w} tokens before them, in sequences of {longest:,} tokens |",
        f"finds beyond {w} tokens |",
        f"perplexity at {longest:,} tokens divided by that at {w}, on",
        f"| level | logarithm of the perplexity at {w} tokens |",
        f"mean gain is below {harmed} nats, or whose mean perplexity rises by more than"
        f" {int(rise)}% up to {longest:,} tokens",
        f"the error has {len(seeds) - 1} (M − 1) degrees of freedom",
        f"searched with one member of its family, for {few} steps",
        f"| 1 | {len(rates.cells)} of {few} steps |",
        f"| 2 | {len(arena.cells)} of {steps:,} steps |",
        f"| 3 | {len(arena.cells)} measured |",
        "there is no family 2.", "Holm correction at 5%:", "each method is above 0 (one-sided)",
    )  # fmt: skip


def test_the_papers_claims_hold_in_its_tables_on_all_corpora():
    arena = grid("arena")
    longest, trained = max(arena.about.lengths), arena.cells[0].config().model.seq_length
    of_table = json.loads((CONFIGS / "paper" / "tables.json").read_text())["tables"]["small-512"]
    length = {trained: "512", longest: "8192"}

    def paper(corpus: str, text: str) -> float:
        what, _, name = text.rpartition("change of ")
        name, _, at = name.partition(" at ")
        row = of_table[corpus][name]
        values = {each: row[found][0] for each, found in length.items()}
        return values[int(at)] if at else values[longest] / values[trained]

    with (LAB / "tables" / "arena_claims.csv").open(newline="") as file:
        claims = [*csv.DictReader(file)]
    for claim in claims:
        lower, higher = claim["lower"], claim["higher"]
        methods = re.findall(r"\w+(?= at)|(?<=of )\w+", f"{lower} {higher}")
        assert {*methods} <= {*arena.about.axes["embedding"]}
        if claim["in the paper"] == "Figure 5":
            continue
        name = claim["in the paper"].lower().replace(" ", "")
        own = {*grid(name).about.axes["embedding"]}
        assert {*methods} <= own | {*grid("table3").about.axes["embedding"]} and own & {*methods}
        for corpus in of_table:
            assert paper(corpus, lower) < paper(corpus, higher), (corpus, claim)
    assert [claim["claim"] for claim in claims] == [str(n + 1) for n in range(14)]
    assert len(of_table) == 3 and int(length[longest]) == 16 * 512 and longest == 16 * trained
    says(
        PAGE,
        f"Claims 1 to {len(claims) - 1} hold in the paper's Tables 3 and 6 on all three corpora."
        f" Claim {len(claims)} is that of Figure 5",
        f"The paper's 512 tokens of training are the arena's {trained}. In both, the longest length"
        f" is 16 times that: 8,192 and {longest:,} tokens.",
        f"{word(len(arena.about.seeds))} pairs on code, and one on prose and LaTeX each",
        f"probability 1/{2 ** len(arena.about.seeds)}, and in each of five with 1/{2**5}.",
    )


def test_the_other_text():
    arena, paper = grid("arena"), grid("table3").about.axes["embedding"]
    seed, steps = arena.about.seeds[0], int(arena.variables["steps"])
    with (LAB / "tables" / "arena_hours.csv").open(newline="") as file:
        *_, given = csv.DictReader(file)
    (of_step_2,) = re.findall(r"2 \| 72 of .* \| ([\d.]+) \|", (LAB / "plan_arena.md").read_text())
    most = 2 * (len(paper) + 5)
    assert given == {
        "step": "5", "runs": f"at most {most} of {steps:,} steps",
        "hours of two cores": f"{float(of_step_2) * most / len(arena.cells):.1f}",
    }  # fmt: skip
    assert {*paper} < {*arena.about.axes["embedding"]}
    says(
        PAGE,
        f"the paper's {word(len(paper))} embeddings ({', '.join(f'`{name}`' for name in paper)})",
        f"The seed is {seed} alone",
        f"--only METHOD-{seed}",
    )


def test_the_tasks_with_a_prediction():
    about, cells = grid("arena_tasks").about, grid("arena_tasks").cells
    configs = {cell.axes["task"]: cell.config() for cell in cells}
    tasks = {name: each.data for name, each in configs.items()}
    options = {name: each.task_options for name, each in tasks.items()}
    (longest,) = {each["max_length"] for each in options.values()}
    (steps,) = {each.training.train_iters for each in configs.values()}
    symbols = options["unique_copy"]["symbols"]

    def distinct(length: int) -> float:
        return math.perm(symbols, length) / symbols**length

    assert tasks["copy"].data_path == tasks["copy_64"].data_path == "builtin:copy"
    assert options["copy"] | {"symbols": symbols} == options["copy_64"] == options["unique_copy"]
    with (LAB / "tables" / "arena_tasks.csv").open(newline="") as file:
        table = {row["task"]: row["examples"] for row in csv.DictReader(file)}
    assert [*table] == [*about.axes["task"]]
    assert table["unique_copy"] == f"rows of different numbers below {symbols}"
    assert table["copy_64"] == f"rows of numbers below {symbols}, which may recur"
    of = {cell.axes["embedding"]: cell.config().model for cell in cells}
    says(
        PAGE,
        f"| 4 | {len(cells)} of {steps:,} steps |",
        f"eight embeddings on four [length tasks](../length_tasks.md), trained at lengths 1 to"
        f" {longest} for {steps:,} steps, seeds {about.seeds[0]} to {about.seeds[-1]}.",
        f"its score at length {about.lengths[0]} is at least 0.8.",
        f"its score at length {about.lengths[1]} is at least half of that at length {longest}.",
        f"both numbers of runs, of {word(len(about.seeds))}. Length {about.lengths[2]} is",
        f"`length` of `fire` is {2 * longest}, the inputs of",
        f"of `rpe` begins at distance {of['rpe'].rpe_max_distance}, which",
        f"{distinct(longest):.0%} of the rows of length {longest} have no number twice, and"
        f" {distinct(about.lengths[1]):.0%} of those of length {about.lengths[1]}.",
    )
    assert of["fire"].pos_emb_options == {"length": 2 * longest}
    assert of["rpe"].rpe_max_distance == of["rpe"].rpe_num_buckets == 8 < longest + 1
    assert (len(about.axes["embedding"]), len(table)) == (8, 4)
