"""Test that the page of the arena's results says what its tables of results have."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from megatron.evaluation.suite.recall import DEPTHS
from tests.pages.figures.held import RESULTS, and_list, grid, says, word

PAGE = "lab/arena_results"
RUNS = pd.read_csv(RESULTS / "arena" / "runs.csv")
RUNS["least"] = RUNS[["gain", "exact"]].min(axis=1)
METHODS = pd.read_csv(RESULTS / "arena" / "methods.csv").set_index("method")
CLAIMS = pd.read_csv(RESULTS / "arena" / "claims.csv")
BY_LENGTH = np.exp(
    np.log(RUNS.set_index("method").filter(like="perplexity_")).groupby(level=0).mean()
)
BY_LENGTH.columns = [int(name.partition("_")[2]) for name in BY_LENGTH]


def of(method: str) -> pd.DataFrame:
    return RUNS[RUNS.method == method].sort_values("seed")


def labelled(label: str) -> list[str]:
    return list(METHODS.index[METHODS.label == label])


def named(methods) -> str:
    return and_list(f"`{each.replace('+', ' + ')}`" for each in methods)


def test_the_methods_and_labels():
    config = grid("arena").cells[0].config()
    arena = grid("arena").about
    methods, seeds = arena.axes["embedding"], arena.seeds
    (documents,) = {*RUNS.documents}
    gains, loses, unclear = map(labelled, ("gains", "loses", "unclear"))
    assert len(RUNS) == len(methods) * len(seeds) == 72 and "kerple_log" in unclear
    shares = METHODS.share.dropna()
    assert [*shares.index] == gains
    of_runs = RUNS.gain / RUNS.seed.map(of("kerple_log").set_index("seed").headroom)
    of_runs = of_runs[RUNS.method.isin(gains)]
    says(
        PAGE,
        f"training length W = {config.model.seq_length}? The",
        f"{len(methods)} methods with {word(len(seeds))} seeds each ({seeds[0]} to {seeds[-1]})",
        f"for {int(grid('arena').variables['steps']):,} steps, and measured on {documents} other"
        f" documents, in sequences of {max(arena.lengths):,} tokens.",
        f"{word(len(gains)).capitalize()} of {len(methods)} methods *gain* from text beyond 128",
        f"These are {named(gains)}. On average, they take {shares.min():.0%} to {shares.max():.0%}"
        f" (single runs {of_runs.min():.0%} to {of_runs.max():.0%}) of what",
        f"{word(len(loses)).capitalize()} methods *lose*: {named(loses)}.",
        f"For the other {word(len(unclear))}, `kerple_log` among them",
        f"All {len(RUNS)} runs ended",
        f"of the same seed: {of('kerple_log').headroom.mean():.2f} nats. Only",
        f"all runs read the same {documents} documents",
    )
    rates = METHODS.rate[gains].value_counts()
    says(
        PAGE, f"{word(rates['of its family'])} of the {word(len(gains))} methods that gain have the"
    )


def test_which_runs_were_made_on_which_machine():
    """In the order of the grid, the first 34 on one machine, and the others on another."""
    cells = [cell.axes["embedding"] for cell in grid("arena").cells]
    first, other = set(cells[:34]), set(cells[34:])
    assert first & other == {"sandwich"} and cells[33] == "sandwich" != cells[32]
    gaussian = ["gaussian", "gaussian3", "gaussian_mul"]
    one = [*dict.fromkeys(cells[:33])]
    plain = [name for name in one if name not in gaussian and "alibi" not in name]
    listed = ", ".join(f"`{name}`" for name in plain)
    says(
        PAGE,
        f"34 runs were made on two cores of an Intel Xeon (family 6, model 167): all of {listed},"
        " the three Gaussian kernels, `alibi` and `alibi_learned`, and `sandwich` with seed 1246."
        f" The other {len(cells) - 34} were",
    )
    sides = CLAIMS[["lower", "higher"]].map(
        lambda text: re.sub(r" at .*|.* of ", "", text) in {*cells[:34]}
    )
    between = CLAIMS[sides.lower != sides.higher].set_index("claim").difference
    near = between[between < 0.06]
    says(
        PAGE,
        f"Claims {and_list(between.index)} compare such methods; the mean differences of claims"
        f" {and_list(near.index)} are {near.min():.2f} to {near.max() + 0.005:.2f} nats.",
    )


def test_a_falling_perplexity_is_no_gain():
    falls = METHODS[METHODS.change < 0].label.value_counts()
    says(
        PAGE,
        f"The mean perplexity of {falls.sum()} methods falls from 128 to 2,048 tokens. Of these,"
        f" {falls['gains']} gain, {falls['unclear']} are unclear, and {falls['loses']} lose.",
    )
    rises = RUNS[RUNS.perplexity_2048 > RUNS.perplexity_128].groupby("method").size()
    always = {*rises.index[rises == 3]}
    gaussian = {"gaussian", "gaussian3", "gaussian_mul"}
    assert always == gaussian | {"rotary", "sinusoidal", "none", "fire", "kerple_power_mul"}
    says(
        PAGE,
        "With `rotary`, `sinusoidal`, `none`, `fire`, `kerple_power_mul` and the Gaussian kernels,"
        " the perplexity is higher at 16 times the training length than at that length, in every",
    )


def test_what_the_text_says_of_gains():
    starts = {
        name: sorted([*of(name).gain_low, *of(name).exact_low])
        for name in ("kerple_log", "alibi")
    }  # fmt: skip
    log = starts["kerple_log"]
    assert sum(each < 0 for each in log) == 2 and sum(each < 0 for each in starts["alibi"]) == 3
    assert (RUNS[RUNS.method.isin(starts)][["gain_high", "exact_high"]] > 0).all(axis=None)
    crosses = of("bam").set_index("seed")[["gain_low", "exact_low"]] < 0
    assert crosses.loc[1248].all() and not crosses.loc[[1246, 1247]].any(axis=None)
    apart = (METHODS.gain - METHODS.exact).abs()
    far = {"log_n+bam", "log_n+kerple_log", "fire", "none", "sinusoidal"}
    assert {*apart.index[apart > 0.06]} == {*apart.index[apart >= 0.03]} == far
    gains = labelled("gains")
    pairs = [(a, b) for a in gains for b in gains]
    above = {(a, b) for a, b in pairs if (of(a).least.array > of(b).least.array).all()}
    assert above == {("alibi_learned", "kerple_log3")}
    assert METHODS.label["alibi"] == "unclear" and (of("kerple_log")[["gain", "exact"]] > 0).all(
        None
    )
    says(
        PAGE,
        f"and two contain 0 (they begin at {log[0]:.4f} and {log[1]:.5f}). Of `alibi`, three",
        "`bam` has one run (seed 1248) whose intervals contain 0.",
        "With `log_n + bam`, `log_n + kerple_log`, `fire`, `none` and `sinusoidal`, *gain* and",
        "differ by more than 0.06 nats, and with all others by less than 0.03.",
        "`alibi_learned` is above `kerple_log3`. The plan has no test of it.",
    )


def test_runs_with_a_lower_perplexity_gain_more():
    positive = METHODS.index[METHODS.least > 0]
    runs = RUNS[RUNS.method.isin(positive)]
    rho = spearmanr(runs.perplexity_128, runs.least)[0]
    within = runs[["perplexity_128", "least"]].sub(
        runs.groupby("method")[["perplexity_128", "least"]].transform("mean")
    )
    assert within.corr().iloc[0, 1] < -0.8
    both = of("kerple_sum").set_index("seed")
    assert (both.places > 0).tolist() == [False, False, True]
    least, middle, most = sorted(both.perplexity_128)
    assert least == both.perplexity_128[1248]
    says(
        PAGE,
        f"smaller gain is {rho:.2f}, over {len(runs)} runs of the {len(positive)} methods",
        f"perplexity {middle:.1f} and {most:.1f} without recall, and {least:.1f} with it.",
    )


def test_the_second_study():
    runs = pd.read_csv(RESULTS / "recipe_dose" / "recipes.csv").query("dose == 1400")
    means = runs.groupby("embedding")[["gain", "share"]].mean()
    log = runs[runs.embedding == "kerple_log"]
    first, last = (log[name].mean() for name in ("perplexity_W", "perplexity_16W"))
    assert (runs[runs.embedding == "alibi"].gain_low > 0).all()
    assert first < METHODS.level.map(np.exp)["kerple_log"] and last < BY_LENGTH[2048]["kerple_log"]
    ours = of("kerple_log")
    most = pd.read_csv(RESULTS / "recipe_dose" / "verdicts.csv").set_index(["embedding", "dose"])
    says(
        PAGE,
        f"asked for 30%, and reached {most.share['kerple_log', 5600]:.0%} after four times as many",
        f"its `kerple_log` took {means.share['kerple_log']:.0%}; here the ratio would be"
        f" {(ours.gain / ours.headroom).mean():.0%}.",
        f"`alibi` gained {means.gain['alibi']:.4f} nats after as many steps",
        f"({first:.2f} at 128 tokens, {last:.2f} at 2,048) and a larger gain"
        f" ({means.gain['kerple_log']:.4f}).",
    )


def lowest(length: int) -> list[str]:
    """Return the method with the lowest perplexity at a length, for each seed."""
    runs = RUNS.set_index("method").groupby("seed")[f"perplexity_{length}"]
    return [*runs.idxmin()]


def test_what_the_text_says_of_levels_and_recall():
    assert lowest(128) == lowest(256) == ["rpe"] * 3 != lowest(512)
    assert BY_LENGTH.loc["rpe"].idxmin() == 512
    assert lowest(2048) == ["bam", *["kerple_power_add_mul"] * 2]
    first = BY_LENGTH[2048].nsmallest(3)
    assert [*first.index] == ["bam", "kerple_power_add_mul", "kerple_log3"]
    assert METHODS.places.idxmax() == "rpe" and (of("rpe").induction == 1024).all()
    none = {"forget_gate", "forget_gate+kerple_log", "none", "kerple_power_mul"}
    assert {*METHODS.index[METHODS.places == 0]} == none | {"gaussian", "gaussian3", "gaussian_mul"}
    assert METHODS.places["bam"] == METHODS.places["kerple_log3"]
    back = [(1 - depth) * length for length in (128, 512, 2048) for depth in DEPTHS]
    assert len(back) == 9 and RUNS.induction.max() == 1024
    says(
        PAGE,
        f"At 2,048 tokens, the means of `bam` ({first['bam']:.2f}), `kerple_power_add_mul`"
        f" ({first['kerple_power_add_mul']:.2f}) and `kerple_log3` ({first['kerple_log3']:.2f})",
        f"`rpe` has a loss that is {-METHODS.least['rpe']:.2f} nats higher with distant text",
        f"`rpe` copies from {METHODS.places['rpe']:.1f} of nine places on average",
        f"copy from {METHODS.places['bam']:.1f} places.",
        f"{word(sum(each <= 128 for each in back)).capitalize()} of them are at most 128 tokens",
    )


def test_what_the_text_says_of_tests():
    shown = METHODS[METHODS.gain_p < 0.05]
    assert [*shown.index] == ["alibi_learned"]
    differs = METHODS[METHODS.gain_differs_p < 0.05]
    log = METHODS.loc["kerple_log"]
    assert (differs.least < log.least).all() and not (differs.label == "gains").any()
    level = METHODS[METHODS.level_differs_p < 0.05]
    assert {*level.index} == {"kerple_power_mul", "gaussian", "none"}
    assert (level.level > log.level).all()
    says(
        PAGE,
        f"with `alibi_learned` (p = {shown.gain_p.item():.3f}).",
        f"The p value of `kerple_log3` is {METHODS.gain_p['kerple_log3']:.3f}.",
        f"with {word(len(differs))} methods: {named(sorted(differs.index, key=order))}.",
        f"`kerple_log` with {named(sorted(level.index))}. No method's level",
    )
    levels = np.log(RUNS.pivot(index="method", columns="seed", values="perplexity_128"))
    paired = levels.sub(levels.loc["kerple_log"]).drop("kerple_log").std(axis=1)
    alone = np.sqrt(levels.var(axis=1) + levels.loc["kerple_log"].var()).drop("kerple_log")
    says(
        PAGE, f"larger than the unpaired one for {(paired > alone).sum()} of {len(paired)} methods."
    )


def order(method: str) -> tuple[bool, str]:
    return "+" not in method, method


def test_what_the_text_says_of_claims():
    verdicts = CLAIMS.verdict.value_counts()
    undecided = CLAIMS[CLAIMS.verdict == "undecided"]
    sides = " ".join([*undecided.lower, *undecided.higher])
    assert {*re.findall(r"kerple_\w+|rpe", sides)} == {"kerple_log", "kerple_power", "rpe"}
    gap = CLAIMS.difference[(CLAIMS.lower == "kerple_log at 2048")].iloc[0]
    assert CLAIMS.lower[CLAIMS.verdict == "contradicted"].item() == "kerple_log at 2048"
    says(
        PAGE,
        f"Of the paper's {len(CLAIMS)} orders, {verdicts['supported']} hold in each of three runs,"
        f" {verdicts['undecided']} are undecided, and {verdicts['contradicted']} is contradicted:"
        " `kerple_power_add_mul` is below `kerple_log` at 2,048",
        f"the mean of `kerple_power` is {-gap:.2f} nats lower.",
    )
    at_first = RUNS.pivot(index="method", columns="seed", values="perplexity_128")
    at_last = CLAIMS[CLAIMS.lower.str.endswith("at 2048") & (CLAIMS.verdict == "supported")]
    before = [
        (at_first.loc[lower.partition(" ")[0]] < at_first.loc[higher.partition(" ")[0]]).all()
        for lower, higher in zip(at_last.lower, at_last.higher, strict=True)
    ]
    assert [*at_last.claim[before]] == [2, 4, 20, 21, 22, 23]
    assert CLAIMS.verdict.iloc[-1] == "supported" and METHODS.label["kerple_log"] == "unclear"


def test_a_run_on_two_machines():
    again = pd.read_csv(RESULTS / "arena" / "again.csv").iloc[0]
    runs = of("sandwich").set_index("seed")
    first = runs.loc[again.seed]
    values = sorted(runs.perplexity_128)
    apart = [values[1] / values[0], values[2] / values[1], values[2] / values[0]]
    says(
        PAGE,
        f"its perplexity is {1 - again.perplexity_128 / first.perplexity_128:.1%} lower at 128"
        f" tokens and {1 - again.perplexity_2048 / first.perplexity_2048:.1%} at 2,048, its gain"
        f" {again.gain - first.gain:.4f} nats larger, and it copies from {again.places:.0f} places"
        f" instead of {first.places:.0f}.",
        f"with the three seeds differ by {min(apart) - 1:.0%} to {max(apart) - 1:.0%} at 128",
    )
