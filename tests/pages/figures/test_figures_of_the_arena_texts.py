"""Test that the page of the arena's results says what its runs on other text have."""

from __future__ import annotations

import importlib

import pandas as pd
from scipy.stats import spearmanr

from tests.pages.figures.held import LAB, RESULTS, and_list, grid, says, word

PAGE = "lab/arena_results"
SEED = 1246
LABELS = pd.read_csv(RESULTS / "arena" / "methods.csv").set_index("method")
CORRELATIONS = pd.read_csv(RESULTS / "arena" / "texts.csv").set_index("text")
CLAIMS = pd.read_csv(RESULTS / "arena" / "claims.csv").set_index("claim")


def runs_of(name):
    """Return the runs of a text with one seed, by method, with the smaller of the two gains."""
    runs = pd.read_csv(RESULTS / name / "runs.csv").query(f"seed == {SEED}").set_index("method")
    return runs.assign(least=runs[["gain", "exact"]].min(axis=1))


CODE, PROSE, LATEX = (runs_of(name) for name in ("arena", "arena_prose", "arena_latex"))


def above(runs):
    return sorted(runs.index[(runs[["gain_low", "exact_low"]] > 0).all(axis=1)])


def named(methods):
    return and_list(f"`{name}`" for name in methods)


def test_what_the_text_says_of_gains_on_other_text():
    code = CODE.loc[PROSE.index].sort_values("least", ascending=False)
    best = {*LABELS.least.nlargest(2).index}
    assert best == {"kerple_power", "kerple_power_add_mul"} == {*code.index[3:5]}
    assert not best & {*above(PROSE)} and (PROSE.places == 0).all()
    (documents,) = {*PROSE.documents}
    log, shares = "kerple_log", []
    tops = [(PROSE, log), (CODE, "bam")]
    for runs, top in tops:
        assert runs.loc[PROSE.index].least.idxmax() == top
        shares.append(f"{runs.least[top] / runs.headroom[log]:.0%}")
    says(
        PAGE,
        f"{word(len(PROSE)).capitalize()} methods, chosen as",
        f"measured on the {documents} addresses of more than 2,048 tokens among the last 35 (from",
        f"on the {LATEX.documents[log]} LaTeX files of that length",
        f"finds {PROSE.headroom[log]:.3f} nats on prose, and {CODE.headroom[log]:.3f} on code. The"
        f" largest smaller gains are {PROSE.least[log]:.4f} nats (`kerple_log`) and"
        f" {CODE.least['bam']:.4f} (`bam`): {' and '.join(shares)} of this.",
        f"On prose, both intervals are above 0 with {named(above(PROSE))}.",
        f"(ten methods, one run each), no gain is above {PROSE.least.max():.4f} nats, and on LaTeX"
        f" {LATEX.least.max():.4f}.",
    )


def test_what_the_text_says_of_orders_on_other_text(monkeypatch):
    monkeypatch.syspath_prepend(LAB)
    prose = CORRELATIONS.loc["prose"]
    lose = prose.methods - prose["methods that do not lose"]
    found = CLAIMS.arena_prose[CLAIMS.arena_prose != "0 of 0"]
    assert [*found.index[found == "0 of 1"]] == [3, 5, 12, 13]
    assert CLAIMS.verdict[19] == "contradicted" and found[19] == "1 of 1"
    kept = PROSE.index[LABELS.label[PROSE.index] != "loses"].drop("sinusoidal")
    rho = spearmanr(CODE.least[kept], PROSE.least[kept])[0]
    claims = importlib.import_module("arena_claims")
    gaps = {
        number: claims.side(PROSE.reset_index(), claim.higher).item()
        - claims.side(PROSE.reset_index(), claim.lower).item()
        for number, claim in CLAIMS.loc[found.index].iterrows()
    }
    small = [number for number, gap in gaps.items() if abs(gap) < 0.01]
    assert {3, 5, 12, 13, 19} <= {*small}
    says(
        PAGE,
        f"code and on prose is {prose.rho:.2f} with all {word(len(PROSE))} methods, and"
        f" {prose['their rho']:.2f} without the {word(int(lose))} that lose on code. Without"
        f" `sinusoidal` too, it is {rho:.2f} (exploratory).",
        f"Of the {len(found)} claims that can be compared, {(found == '1 of 1').sum()} hold on"
        f" prose; with equal methods, chance would give {len(found) // 2} or {-(-len(found) // 2)}."
        f" In {len(small)} of the {len(found)}, the two sides differ by less than 0.01 nats.",
        f"holds by {gaps[19]:.4f} nats.",
    )
    first = pd.read_csv(RESULTS / "prose" / "results.csv")
    first = first.query("length == 2048 and metric == 'perplexity'")
    means = first.groupby("embedding").value.mean()
    assert means["kerple_power"] < means["kerple_log"] and means["kerple_power"] < means["rpe"]
    assert found[1] == "1 of 1" and found[5] == "0 of 1"


def test_what_the_text_says_of_latex():
    top, found = LATEX.least.idxmax(), CLAIMS.arena_latex[CLAIMS.arena_latex != "0 of 0"]
    headroom, latex = LATEX.headroom["kerple_log"], CORRELATIONS.loc["latex"]
    kept = LATEX.index[LABELS.label[LATEX.index] != "loses"].drop("sinusoidal")
    rho = spearmanr(CODE.least[kept], LATEX.least[kept])[0]
    log = LATEX.loc["kerple_log"]
    assert (
        log.gain_low < 0 < log.gain_high
        and (LATEX.places == 0).all()
        and {*LATEX.index} == {*PROSE.index}
    )
    says(
        PAGE,
        f"On LaTeX, both intervals are above 0 with {named(above(LATEX))}. The largest smaller gain"
        f" is {LATEX.least[top]:.4f} nats (`{top}`), {LATEX.least[top] / headroom:.0%} of the"
        f" {headroom:.3f} that the pointer finds.",
        f"with code is {latex.rho:.2f} with all ten methods, {latex['their rho']:.2f} without the"
        f" two that lose on code, and {rho:.2f} without `sinusoidal` too.",
        f"Of the {len(found)} claims, {(found == '1 of 1').sum()} hold; claims"
        f" {and_list(found.index[found == '0 of 1'])} do not (24 by"
        f" {-log.gain:.4f} nats, and the interval of this gain contains 0).",
    )


def test_most_runs_on_code_were_made_on_the_other_machine():
    """The first 34 cells of the grid were run there (see the tests of the page's first part)."""
    other = {cell.axes["embedding"] for cell in grid("arena").cells[:33]}
    alone = [name for name in ("bam", "rpe", "rotary", "sinusoidal") if name not in other]
    assert {*PROSE.index} - other == {*alone} and len(alone) == 4
    again = pd.read_csv(RESULTS / "arena" / "again.csv").iloc[0]
    apart = again.gain - CODE.gain["sandwich"]
    assert apart > PROSE.least.max() / 2
    says(
        PAGE,
        f"On code, {word(len(PROSE) - 4)} of the ten (all but {named(alone)}) ran on the other",
        f"differ by {apart:.4f} nats in *gain*",
    )
