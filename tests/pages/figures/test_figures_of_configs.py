"""Test that the figures of configs/README.md and of the paper's grids are those of the configs."""

from __future__ import annotations

import json
import re

from megatron.config import load_config
from tests.helpers.paths import CONFIGS, ROOT
from tests.model.published_sizes import BESIDE_EMBEDDINGS, GPT3, PYTHIA
from tests.pages.figures.held import QUICKSTART, and_list, grid, rows, says, smallest, word

PAGE, GUIDE = CONFIGS / "README.md", ROOT / "docs" / "experiments.md"
README, DEFAULTS = "../configs/README", "Defaults where the two code bases differ"
SMALL = f"{PYTHIA['small', 128][0] / 1e6:.0f}M parameters"
LARGE = f"{GPT3['xl'] / 1e9:.1f}B parameters"
SIZES = {"own_160M": PYTHIA["small", 128][0], "own_1.4B": PYTHIA["xl", 128][0]}
"""The parameters of the models whose recipes read a number of tokens for each parameter."""
PAPER = ("model/small.yml", "paper/train.yml", "pos_emb/kerple_log.yml", "cluster/cpu.yml")
WITHOUT_TABLE = [
    *("stand_in", "stand_in_lr", "stand_in_backends", "stand_in_fused", "stand_in_terms"),
    *("length_tasks", "recipe_screen", "retrofit_base", "arena_rates"),
]
"""The grids of the guide that are of no table of the paper."""


def joined(values, last: str = ", ") -> str:
    return last.join(dict.fromkeys(values))


def amount(tokens: int) -> str:
    if tokens > 999e9:
        return f"{tokens / 1e12:.0f} trillion"
    return f"{tokens / 1e9:.{1 if tokens < 1e10 else 0}f} billion"


def tables_of(text: str) -> tuple[str | None, ...] | None:
    """Return the numbers of the paper's tables with which a text begins."""
    found = re.match(r"(?:# )?Tables? (\d+)(?: and (\d+))?", text)
    return found and found.groups()


def head(name: str) -> str:
    return (CONFIGS / "paper" / f"{name}.yml").read_text()


def test_the_recipes():
    for row in rows(PAGE, "Recipes"):
        names = re.findall(r"\w+_[\d.]+[MB]\b", row["recipes/"])
        found = [load_config([CONFIGS / f"recipes/{name}.yml"], world_size=8) for name in names]
        steps = [each.batch.train_batch_size * each.model.seq_length for each in found]
        total = [n * each.training.train_iters for n, each in zip(steps, found, strict=True)]
        rates = list(dict.fromkeys(each.optimizer.lr for each in found))
        assert row["tokens per step"] == joined(f"{n:,}" for n in steps)
        assert [float(rate) for rate in row["learning rate"].split(", ")] == rates
        told = joined(map(amount, total), " and ")
        assert row["total tokens"] == told.replace(" billion and", " and")
        if names[0] in SIZES:
            (each,) = {round(n / SIZES[name]) for name, n in zip(names, total, strict=True)}
            assert row["recipes/"].endswith(f", {each} tokens per parameter")


def test_the_published_models():
    by_size = {}
    for row in rows(PAGE, "Published models"):
        files, neox, pythia = row.values()
        sizes = re.findall(r"[\w-]+", files)
        by_size |= dict.fromkeys(sizes, pythia)
        counts = [{**GPT3, **BESIDE_EMBEDDINGS}.get(size) for size in sizes]
        named = (f"{n / 1e9:g}B" if n >= 1e9 else f"{n / 1e6:g}M" for n in counts if n)
        assert neox == joined(named).replace(".", "-")
    assert by_size.keys() == {each.stem for each in (CONFIGS / "model").glob("*.yml")} - {"tiny"}
    for (size, divisible_by), (count, _) in PYTHIA.items():
        padded = f", `make_vocab_size_divisible_by: {divisible_by}`" * (divisible_by != 128)
        assert f" ({count:,}{padded})" in by_size[size]
    (tiny,) = re.findall(r"^# (\S+) parameters", (CONFIGS / "model" / "tiny.yml").read_text())
    says(
        README,
        f"from {tiny} (`tiny`, without embeddings) to {max(GPT3.values()) / 1e9:.0f}B parameters",
    )


def test_the_defaults():
    """The reference of all keys, which a program writes, names the default of the other code."""
    reference, compared = (ROOT / "docs/configuration.md").read_text(), 0
    for row in rows(PAGE, DEFAULTS):
        for key in re.findall(r"[\w.]+", row["key"]):
            pattern = rf"\| `{key}` \| `(.*?)` \|.* (?:gpt-neox|code)'s default, (.*): (.*) \|"
            if found := re.search(pattern, reference):
                ours, other, theirs = found.groups()
                both = (theirs, ours) if other == "published code" else (ours, theirs)
                assert list(row.values())[1:] == [*both, ours]
                compared += 1
    assert compared == 5
    gated = smallest("activation=geglu").model
    factor, left = divmod(gated.intermediate_size, gated.hidden_size)
    stages = (smallest(*given).parallel.zero_stage for given in ([], ["zero_optimization={}"]))
    left_out = "stage {} (stage {} if the key is given without `stage`)".format(*stages)
    told = {row["key"].strip("`").split("`")[0]: row for row in rows(PAGE, DEFAULTS)}
    width = told["intermediate_size"]
    assert width["published KERPLE code"] == width["here"] == f"{factor} x `hidden_size"
    assert told["zero_optimization"]["here"] == left_out.strip("`") and not left
    single = QUICKSTART.batch.gradient_accumulation_steps
    says(README, f"If only one is set, accumulation is {single}.")


def test_the_grids_of_the_paper():
    without = []
    for row in rows(GUIDE, "The paper's tables"):
        names = re.findall(r"paper/(\w+)\.yml\)", row["grid"])
        assert row["runs"] == ", ".join(str(len(grid(name).cells)) for name in names)
        tables = tables_of(row[""])
        assert tables == tables_of(head(names[0])), names
        without += [] if tables else names[:1]
    assert without == WITHOUT_TABLE
    small, large = grid("table3").about, grid("xl").about
    embeddings, corpora = (word(len(small.axes[name])) for name in ("embedding", "corpus"))
    (table,), seeds = tables_of(head("table3"))[:1], word(len(small.seeds))
    told = f"Table {table}: {embeddings} embeddings, {corpora} corpora, {seeds} seeds, {SMALL} |"
    says("experiments", told)
    (table,), embeddings = tables_of(head("xl"))[:1], word(len(large.axes["embedding"]))
    told = f"Table {table}: {embeddings} embeddings at {LARGE}, {word(large.processes)} GPUs for"
    says("experiments", told)
    tables = and_list(tables_of(head(name))[0] for name in ("table3", "table5", "table6", "xl"))
    says(README, f"the paper's Tables {tables} ({LARGE})")
    says(README, f"a grid: Table {tables_of(head('released'))[0]} from released")


def test_the_lengths_of_the_paper():
    tables = json.loads((CONFIGS / "paper/tables.json").read_text())["tables"]
    short, long = sorted(int(x[6:]) for x in tables if re.fullmatch(r"small-\d+", x))
    says("experiments", f"train at length {short}, or at {long:,} with")
    sizes = set()
    for name in ("table3", "xl", "table5", "table6", "released"):
        longest = max(grid(name).about.lengths)
        (tokens,) = (x for x in grid(name).cells[0].overrides if x.startswith("eval_tokens="))
        sizes.add(f"{int(tokens.partition('=')[2]) // longest} sequences of {longest:,} tokens")
    (told,) = sizes
    says("experiments", f"each length on the same text: {told}.")
    published = load_config(
        [CONFIGS / each for each in (*PAPER, "paper/paper_eval.yml")], ["data_path=x"]
    )
    count = published.training.eval_iters * published.batch.train_batch_size
    says("experiments", f"measure {count} sequences of each length, like the paper")
    says("evaluation", f"limits each length to {count} sequences, as in the paper")
