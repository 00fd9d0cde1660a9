"""Test that the tables of the arena's page follow from the measures of its runs, by its scripts."""

from __future__ import annotations

import importlib

import pandas as pd
import pytest

from tests.pages.figures.held import LAB, RESULTS, grid

CODE = RESULTS / "arena"
TEXTS = ("prose", "latex")
OTHER = [RESULTS / f"arena_{text}" for text in TEXTS]


def script(name):
    return importlib.import_module(name)


def runs_of(folder):
    return pd.read_csv(folder / "runs.csv")


def same_table(found, path):
    """Assert that a file has these values, to the digits that it is written with."""
    written = pd.read_csv(path)
    pd.testing.assert_frame_equal(found, written, check_dtype=False, rtol=1e-4, atol=1e-9)


def test_each_run_of_the_plan_has_one_row_or_a_reason():
    wanted = {(cell.axes["embedding"], cell.seed): cell.name for cell in grid("arena").cells}
    runs = runs_of(CODE)
    rows = [*zip(runs.method, runs.seed, strict=True)]
    assert len({*rows}) == len(rows) and {*rows} <= {*wanted}
    assert runs.notna().all(axis=None) and (runs.documents >= 8).all()
    missing = pd.read_csv(CODE / "missing.csv")
    assert {*missing.cell} == {name for key, name in wanted.items() if key not in rows}
    assert missing.reason.notna().all()


def test_the_labels_and_tests_follow_from_the_runs():
    same_table(script("arena").compared(runs_of(CODE), tests=True), CODE / "methods.csv")


def test_the_verdicts_on_the_papers_claims_follow_from_the_runs():
    claims = script("arena_claims")
    texts = {each.name: runs_of(each) for each in (CODE, *OTHER)}
    found = claims.judged(pd.read_csv(claims.CLAIMS), texts)
    same_table(found, CODE / "claims.csv")


def test_other_text_has_one_run_of_each_chosen_method():
    texts = script("arena_texts")
    chosen = texts.chosen(runs_of(CODE))
    for folder in OTHER:
        runs = runs_of(folder)
        assert runs.method.sort_values().tolist() == sorted(chosen)
        assert (runs.seed == texts.SEED).all() and runs.notna().all(axis=None)
        assert runs.documents.nunique() == 1 and runs.documents[0] >= 8


def test_the_comparison_of_texts_follows_from_the_runs():
    texts = script("arena_texts")
    given = texts.texts_of([CODE, *OTHER])
    gains = texts.gains_by_text(given)
    labels = pd.read_csv(CODE / "methods.csv").set_index("method").label
    found = [texts.correlation(gains, labels, name) for name in TEXTS]
    same_table(pd.DataFrame(found), CODE / "texts.csv")
    assert (CODE / "texts.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [
    "arena_gains", "arena_models", "arena_p_values", "arena_verdicts", "arena_other_gains",
    "arena_other_models",
])  # fmt: skip
def test_the_tables_of_the_page_follow_from_the_results(name):
    page, texts = script("arena_page"), script("arena_texts").texts_of([CODE, *OTHER])
    methods, claims = (pd.read_csv(CODE / f"{each}.csv") for each in ("methods", "claims"))
    found = {
        "arena_gains": lambda: page.gains(methods),
        "arena_models": lambda: page.models(methods, runs_of(CODE)),
        "arena_p_values": lambda: page.p_values(methods),
        "arena_verdicts": lambda: page.verdicts(claims),
        "arena_other_gains": lambda: page.gains_on_texts(texts),
        "arena_other_models": lambda: page.models_on_texts(texts),
    }[name]()
    written = pd.read_csv(LAB / "tables" / f"{name}.csv", dtype=str, keep_default_na=False)
    assert found.astype(str).to_dict("list") == written.to_dict("list")
