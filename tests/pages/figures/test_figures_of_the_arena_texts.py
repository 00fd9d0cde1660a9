"""Test that the page of the arena's results says what its runs on other text have."""

from __future__ import annotations

import importlib
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from tests.pages.figures.held import LAB, RESULTS, and_list, grid, says, word

PAGE = "lab/arena_results"
SEED, LOG = 1246, "kerple_log"
LABELS = pd.read_csv(RESULTS / "arena" / "methods.csv").set_index("method")
CORRELATIONS = pd.read_csv(RESULTS / "arena" / "texts.csv").set_index("text")
CLAIMS = pd.read_csv(RESULTS / "arena" / "claims.csv").set_index("claim")
ALL = pd.read_csv(RESULTS / "arena" / "runs.csv")
ALL["least"] = ALL[["gain", "exact"]].min(axis=1)


def runs_of(name):
    """Return the runs of a text with one seed, by method, with the smaller of the two gains."""
    runs = pd.read_csv(RESULTS / name / "runs.csv").query(f"seed == {SEED}").set_index("method")
    return runs.assign(least=runs[["gain", "exact"]].min(axis=1))


CODE, PROSE, LATEX = (runs_of(name) for name in ("arena", "arena_prose", "arena_latex"))
OTHERS = {"prose": PROSE, "latex": LATEX}
TEN = CODE.loc[PROSE.index]
SEVEN = [name for name in TEN.index if LABELS.label[name] != "loses" and name != "sinusoidal"]


@pytest.fixture
def side(monkeypatch):
    monkeypatch.syspath_prepend(LAB)
    return importlib.import_module("arena_claims").side


def above(runs):
    return sorted(runs.index[(runs[["gain_low", "exact_low"]] > 0).all(axis=1)])


def named(methods):
    return and_list(f"`{name}`" for name in methods)


def compared(name):
    """Return the claims that can be compared on a text, and the text's entry for each."""
    found = CLAIMS[f"arena_{name}"]
    return found[found != "0 of 0"]


def gaps(side, name):
    """Return the difference of the two sides of each claim on a text, in nats."""
    runs, claims = OTHERS[name].reset_index(), CLAIMS.loc[compared(name).index]
    return {
        number: (side(runs, claim.higher) - side(runs, claim.lower)).item()
        for number, claim in claims.iterrows()
    }


def test_what_the_text_says_of_the_texts():
    sizes = pd.read_csv(LAB / "tables" / "arena_text_sizes.csv").set_index("text")
    assert {*PROSE.index} == {*LATEX.index} and [*sizes.index] == ["code", "prose", "latex"]
    for name, runs in {"code": TEN, **OTHERS}.items():
        assert {*runs.documents} == {sizes.measured[name]}
        tokens = int(sizes["tokens of the training split"][name].replace(",", ""))
        assert f"{1400 * 2048 / tokens:.2f}" == f"{sizes.passes[name]:.2f}"
        assert sizes.measured[name] <= sizes["long test documents"][name]
    cells = grid("arena").cells
    rates = {cell.config().optimizer.lr for cell in cells if cell.axes["embedding"] in TEN.index}
    assert rates == {16e-3}
    long = sizes["long test documents"]
    says(
        PAGE,
        f"{word(len(PROSE)).capitalize()} methods, chosen as",
        "(16e-3 for all ten)",
        f"of {long.prose}, all of them longer than 2,048 tokens, {sizes.measured.prose} were drawn",
        f"they are the last {long.latex} files in alphabetical order",
    )


def test_what_the_text_says_of_gains_on_other_text():
    best = {*LABELS.least.nlargest(2).index}
    order = [*TEN.sort_values("least", ascending=False).index]
    assert best == {"kerple_power", "kerple_power_add_mul"} == {*order[3:5]}
    assert {*above(TEN)} & {*above(PROSE)} & {*above(LATEX)} == {"alibi_learned", "bam"}
    spread = ALL.groupby("method").least.std()[SEVEN]
    assert spread.idxmax() == "kerple_power_add_mul"
    tops = {"bam": TEN, "kerple_log": PROSE, "alibi_learned": LATEX}
    assert all(runs.least.idxmax() == top for top, runs in tops.items())
    shares = [f"{runs.least[top] / runs.headroom[LOG]:.0%}" for top, runs in tops.items()]
    largest = [f"{runs.least[top]:.4f} (`{top}`)" for top, runs in tops.items()]
    says(
        PAGE,
        f"finds {CODE.headroom[LOG]:.3f} nats on code, {PROSE.headroom[LOG]:.3f} on prose and"
        f" {LATEX.headroom[LOG]:.3f} on LaTeX",
        f"The largest smaller gains are {and_list(largest)}: {and_list(shares)} of this.",
        f"On prose, both intervals are above 0 with {named(above(PROSE))}, and on LaTeX with"
        f" {named(above(LATEX))}. On all three texts, they are above 0 with `alibi_learned` and"
        " `bam` only.",
        f"without `rpe`, `rotary` and `sinusoidal`, the smaller gains of a method's three runs have"
        f" standard deviations of up to {spread.max():.4f} nats (`kerple_power_add_mul`)",
        f"no method gains more than {PROSE.least.max():.4f} nats on prose and"
        f" {LATEX.least.max():.4f} on LaTeX, by the smaller of both measures.",
        f"(on LaTeX it is {LATEX.gain[LOG]:.4f}, and the interval contains 0)",
    )
    assert LATEX.gain_low[LOG] < 0 < LATEX.gain_high[LOG]
    assert PROSE.gain[LOG] > 0 and (ALL[ALL.method == LOG].gain > 0).all()


def test_what_the_text_says_of_recall_on_other_text():
    assert (PROSE.places == 0).all() and (LATEX.places == 0).all() and (PROSE.induction == 0).all()
    helped = LATEX.index[LATEX.induction > 0]
    assert [*helped] == ["alibi_learned"]
    says(
        PAGE,
        f"On code, {word(int((TEN.places > 0).sum()))} of these ten runs copy.",
        f"`alibi_learned` on LaTeX, up to {LATEX.induction['alibi_learned']} tokens",
    )


def test_what_the_text_says_of_orders_on_other_text():
    of_all, of_kept, of_seven = (
        [f"{value:.2f}" for value in values]
        for values in (
            CORRELATIONS.rho,
            CORRELATIONS["their rho"],
            [spearmanr(CODE.least[SEVEN], runs.least[SEVEN])[0] for runs in OTHERS.values()],
        )
    )
    lose = {*(CORRELATIONS.methods - CORRELATIONS["methods that do not lose"])}
    assert [*CORRELATIONS.index] == ["prose", "latex"] and lose == {2} and len(SEVEN) == 7
    for runs in (TEN, PROSE, LATEX):
        assert {*runs.least.nsmallest(3).index} == {"rpe", "rotary", "sinusoidal"}
    seeds = ALL[ALL.method.isin(SEVEN)].pivot(index="method", columns="seed", values="least")
    between = [spearmanr(seeds[a], seeds[b])[0] for a, b in combinations(seeds, 2)]
    says(
        PAGE,
        f"with those on code is {of_all[0]} on prose and {of_all[1]} on LaTeX. Without the two that"
        f" lose on code, it is {of_kept[0]} and {of_kept[1]}; without `sinusoidal` too,"
        f" {of_seven[0]} and {of_seven[1]} (seven methods, exploratory).",
        f"on code, two seeds agree with {min(between):.2f} to {max(between):.2f}.",
    )


def test_what_the_text_says_of_claims_on_other_text(side):
    holds = {name: compared(name) == "1 of 1" for name in OTHERS}
    (total,) = {len(each) for each in holds.values()}
    fails = {name: [*each.index[~each]] for name, each in holds.items()}
    apart = {name: gaps(side, name) for name in OTHERS}
    near = {
        name: [n for n, gap in each.items() if abs(gap) < 0.025] for name, each in apart.items()
    }
    assert all({*fails[name]} <= {*near[name]} for name in OTHERS)
    assert max(abs(apart["prose"][number]) for number in near["prose"]) < 0.01
    assert CLAIMS.verdict[19] == "contradicted" and holds["prose"][19] and holds["latex"][19]
    says(
        PAGE,
        f"Of the {total} claims that can be compared, {holds['prose'].sum()} hold on prose and"
        f" {holds['latex'].sum()} on LaTeX; with equal methods, chance would give {total // 2} or"
        f" {-(-total // 2)}. Claims {and_list(fails['prose'])} do not hold on prose, and"
        f" {', '.join(map(str, fails['latex'][:-1]))} and 24 do not on LaTeX (24 by"
        f" {-LATEX.gain[LOG]:.4f} nats",
        f"(on prose by {apart['prose'][19]:.4f} nats)",
        f"in {len(near['prose'])} on prose, all of them below 0.01, and in {len(near['latex'])} on"
        " LaTeX.",
    )


def test_what_the_text_says_of_the_first_study(side):
    opposite = {}
    for name in OTHERS:
        first = pd.read_csv(RESULTS / name / "results.csv").query("metric == 'perplexity'")
        first = first.pivot(index=["embedding", "seed"], columns="length", values="value")
        first = first[[128, 2048]].add_prefix("perplexity_").reset_index()
        first = first.rename(columns={"embedding": "method"}).assign(gain=np.nan)
        opposite[name] = []
        for number, gap in gaps(side, name).items():
            claim = CLAIMS.loc[number]
            before = (side(first, claim.higher) - side(first, claim.lower)).mean()
            if gap * before < 0:
                opposite[name].append(number)
    says(
        PAGE,
        f"the means have the opposite order in claims {and_list(opposite['prose'])} on prose, and"
        f" in {and_list(opposite['latex'])} on LaTeX.",
    )


def test_most_runs_on_code_were_made_on_the_other_machine():
    """The first 34 cells of the grid were run there (see the tests of the page's first part)."""
    other = {cell.axes["embedding"] for cell in grid("arena").cells[:33]}
    alone = [name for name in ("bam", "rpe", "rotary", "sinusoidal") if name not in other]
    assert {*PROSE.index} - other == {*alone} and len(alone) == 4
    again = pd.read_csv(RESULTS / "arena" / "again.csv").iloc[0]
    apart = again.gain - CODE.gain["sandwich"]
    shorter, longer = (
        abs(np.log(again[f"perplexity_{length}"] / CODE[f"perplexity_{length}"]["sandwich"]))
        for length in (128, 2048)
    )
    says(
        PAGE,
        f"On code, {word(len(PROSE) - 4)} of the ten (all but {named(alone)}) ran on the other",
        f"differ by {shorter:.2f} nats in perplexity at 128 tokens and {longer:.2f} at 2,048, and"
        f" by {apart:.4f} in *gain*",
    )


def test_the_width_of_the_intervals_of_exact():
    half = (ALL.exact_high - ALL.exact_low) / 2
    wide, below = half.median(), int((np.expm1(half) < 0.01).sum())
    says(
        PAGE,
        f"reaches {wide:.3f} nats to either side, {np.expm1(wide):.1%} of the perplexity."
        f" In {below} of the {len(ALL)} runs, this is below 1%.",
    )
