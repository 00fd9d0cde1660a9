"""Test that the page of the arena's results says what its tables of results have."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

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
    says(
        PAGE,
        f"training length W = {config.model.seq_length}? The",
        f"{len(methods)} methods with {word(len(seeds))} seeds each ({seeds[0]} to {seeds[-1]})",
        f"for {int(grid('arena').variables['steps']):,} steps, and measured on {documents} other"
        f" documents, in sequences of {max(arena.lengths):,} tokens.",
        f"{word(len(gains)).capitalize()} of {len(methods)} methods *gain*",
        f"in each of their {word(len(seeds))} runs: {named(gains)}.",
        f"They take {shares.min():.0%} to {shares.max():.0%} of what",
        f"{word(len(loses)).capitalize()} methods *lose*: {named(loses)}.",
        f"For the other {word(len(unclear))}, `kerple_log` among them",
        f"All {len(RUNS)} runs ended",
        f"beyond 128 tokens, {of('kerple_log').headroom.mean():.2f} nats for `kerple_log`.",
    )


def test_a_falling_perplexity_is_no_gain():
    falls = METHODS[METHODS.change < 0].label.value_counts()
    says(
        PAGE,
        f"the perplexity of {falls.sum()} methods falls from 128 to 2,048 tokens. Only"
        f" {falls['gains']} of these gain, and {falls['loses']} of them lose.",
    )
    rises = RUNS[RUNS.perplexity_2048 > RUNS.perplexity_128].groupby("method").size()
    always = {*rises.index[rises == 3]}
    gaussian = {"gaussian", "gaussian3", "gaussian_mul"}
    assert always == gaussian | {"rotary", "sinusoidal", "none", "fire", "kerple_power_mul"}
    says(PAGE, "With `rotary`, `sinusoidal`, `none`, `fire`, `kerple_power_mul` and the Gaussian")


def test_what_the_text_says_of_gains():
    log, bam, both = of("kerple_log"), of("bam"), of("kerple_sum")
    starts = pd.concat([log.gain_low, log.exact_low])
    says(PAGE, f"its six intervals begin between {starts.min():.4f} and {starts.max():.4f}.")
    ends = bam.set_index("seed")[["gain_low", "exact_low"]].max(axis=1)
    assert [*ends.index[ends < 0]] == [1248] and (METHODS.least["bam"] > 0)
    assert sorted(both[["gain", "exact"]].max(axis=1).round(4) < 0.002) == [False, True, True]
    assert (both[both.seed == 1248][["gain_low", "exact_low"]] > 0).all(axis=None)
    apart = (METHODS.gain - METHODS.exact).abs()
    far = {"log_n+bam", "log_n+kerple_log", "fire", "none", "sinusoidal"}
    assert {*apart.index[apart > 0.06]} == {*apart.index[apart >= 0.03]} == far
    above = {
        (a, b)
        for a in labelled("gains") for b in labelled("gains")
        if (of(a).least.to_numpy() > of(b).least.to_numpy()).all()
    }  # fmt: skip
    assert ("alibi_learned", "kerple_log3") in above
    least = {name: of(name).least for name in labelled("gains")}
    apart_in_all = {(a, b) for a in least for b in least if least[a].min() > least[b].max()}
    assert apart_in_all == {("alibi_learned", "kerple_log3")}
    assert METHODS.label["alibi"] == "unclear" and (of("kerple_log").least > -0.0).all()
    dose = pd.read_csv(RESULTS / "recipe_dose" / "verdicts.csv")
    share = dose[(dose.embedding == "kerple_log") & (dose.dose == 1400)].share.item()
    says(PAGE, f"After 1,400 steps, its `kerple_log` took {share:.0%}.")


def test_what_the_text_says_of_levels_and_recall():
    assert [*BY_LENGTH.idxmin()] == ["rpe"] * 3 + ["bam"] * 2
    assert [*BY_LENGTH.loc["rpe"].sort_values().index[:1]] == [512]
    first = BY_LENGTH[2048].nsmallest(3)
    assert [*first.index] == ["bam", "kerple_power_add_mul", "kerple_log3"]
    assert METHODS.places.idxmax() == "rpe" and (of("rpe").induction == 1024).all()
    none = {"forget_gate", "forget_gate+kerple_log", "none", "kerple_power_mul"}
    assert {*METHODS.index[METHODS.places == 0]} == none | {"gaussian", "gaussian3", "gaussian_mul"}
    assert METHODS.places["bam"] == METHODS.places["kerple_log3"]
    says(
        PAGE,
        f"(14.84 at 128), and rises after that. At 2,048 tokens, `bam` is the lowest"
        f" ({first['bam']:.2f}), then `kerple_power_add_mul`"
        f" ({first['kerple_power_add_mul']:.2f}) and `kerple_log3` ({first['kerple_log3']:.2f}).",
        f"`rpe` loses {-METHODS.least['rpe']:.2f} nats by distant text",
        f"`rpe` copies from {METHODS.places['rpe']:.1f} of nine places on average",
        f"copy from {METHODS.places['bam']:.1f} places.",
    )
    assert f"{BY_LENGTH.loc['rpe', 128]:.2f}" == "14.84"


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
        f"with {word(len(differs))} methods: {named(sorted(differs.index, key=order))}.",
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
        f"By the mean, `kerple_power` is lower by {-gap:.2f} nats.",
    )


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
        f" {again.gain - first.gain:.4f} nats larger.",
        f"three seeds differ by {min(apart) - 1:.0%} to {max(apart) - 1:.0%}.",
    )
