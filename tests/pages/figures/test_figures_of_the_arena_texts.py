"""Test that the page of the arena's results says what its runs on other text have."""

from __future__ import annotations

import pandas as pd

from tests.pages.figures.held import RESULTS, and_list, says, word

PAGE = "lab/arena_results"
SEED = 1246
LABELS = pd.read_csv(RESULTS / "arena" / "methods.csv").set_index("method")
CORRELATIONS = pd.read_csv(RESULTS / "arena" / "texts.csv").set_index("text")
CLAIMS = pd.read_csv(RESULTS / "arena" / "claims.csv").set_index("claim")


def runs_of(name):
    """Return the runs of a text with one seed, by method, with the smaller of the two gains."""
    runs = pd.read_csv(RESULTS / name / "runs.csv").query(f"seed == {SEED}").set_index("method")
    return runs.assign(least=runs[["gain", "exact"]].min(axis=1))


CODE, PROSE = runs_of("arena"), runs_of("arena_prose")


def above(runs):
    return sorted(runs.index[(runs[["gain_low", "exact_low"]] > 0).all(axis=1)])


def named(methods):
    return and_list(f"`{name}`" for name in methods)


def test_what_the_text_says_of_gains_on_other_text():
    code = CODE.loc[PROSE.index]
    best = [*LABELS.gain[LABELS.label == "gains"].nlargest(2).index]
    assert {*best} == {"kerple_power", "kerple_power_add_mul"} and not {*best} & {*above(PROSE)}
    assert (PROSE.places == 0).all()
    (documents,) = {*PROSE.documents}
    log = "kerple_log"
    says(
        PAGE,
        f"{word(len(PROSE)).capitalize()} methods, chosen as",
        f"measured on {documents} other addresses.",
        f"at most {PROSE.least.max():.4f} nats, and on code at most {code.least.max():.4f} with",
        f"finds {PROSE.headroom[log]:.2f} nats there, and {CODE.headroom[log]:.2f} on code.",
        f"Both intervals are above 0 with {named(above(PROSE))}.",
    )


def test_what_the_text_says_of_orders_on_other_text():
    prose = CORRELATIONS.loc["prose"]
    lose = prose.methods - prose["methods that do not lose"]
    found = CLAIMS.arena_prose[CLAIMS.arena_prose != "0 of 0"]
    assert [*found.index[found == "0 of 1"]] == [3, 5, 12, 13]
    assert CLAIMS.verdict[19] == "contradicted" and found[19] == "1 of 1"
    says(
        PAGE,
        f"code and on prose is {prose.rho:.2f} with all {word(len(PROSE))} methods, and"
        f" {prose['their rho']:.2f} without the {word(int(lose))} that lose on code.",
        f"Of the {len(found)} claims that can be compared, {(found == '1 of 1').sum()} hold on",
    )
