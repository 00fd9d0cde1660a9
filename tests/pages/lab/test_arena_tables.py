"""Test the arena's scores of length tasks, its choice for other text, and its claims, by hand."""

from __future__ import annotations

import importlib
import math

import pandas as pd
import pytest

from tests.pages.lab.test_arena import arena_run


def test_other_text_is_for_the_papers_six_and_the_best_by_the_other_seeds(tmp_path):
    texts = importlib.import_module("arena_texts")
    gains = {
        "kerple_log": (0.01, 0.1), "alibi": (0.02, 0.2), "a": (0.9, 0.03), "b": (0.0, 0.3),
        "c": (0.0, 0.04), "d": (0.0, 0.02), "e": (0.0, 0.05),
    }  # fmt: skip
    code = [
        arena_run(name, seed, gain, width=0.5)
        for name, (first, other) in gains.items()
        for seed, gain in ((1246, first), (1247, other), (1248, other))
    ]
    code += [arena_run("short", seed, 0.9, width=0.5) for seed in (1246, 1247)]
    code += [arena_run("loses", seed, 0.8, width=math.nan) for seed in (1246, 1247, 1248)]
    code = pd.DataFrame(code)
    code.loc[code.method == "loses", ["gain_high", "exact_high"]] = -0.1
    assert texts.chosen(code) == [*texts.PAPER, "b", "e", "c"]
    text = [("kerple_log", 3.0), ("alibi", 2.0), ("a", 4.0), ("loses", 0.0), ("other", 9.0)]
    for folder, runs in (
        ("code", code),
        ("prose", pd.DataFrame([arena_run(name, 1246, gain) for name, gain in text])),
    ):
        (tmp_path / folder).mkdir()
        runs.to_csv(tmp_path / folder / "runs.csv", index=False)
    assert texts.main([str(tmp_path / "code"), str(tmp_path / "prose")]) == 0
    [found] = pd.read_csv(tmp_path / "code" / "texts.csv").to_dict("records")
    assert (found["text"], found["methods"], found["methods that do not lose"]) == ("prose", 4, 3)
    assert found["their rho"] == pytest.approx(0.5)  # ranks 1, 2, 3 and 2, 1, 3
    # All four: ranks 1, 2, 4, 3 and 3, 2, 4, 1, so 1 - 6 (4 + 4) / (4 * 15).
    assert found["rho"] == pytest.approx(0.2)


def test_the_tables_of_other_text_are_the_runs_of_one_seed():
    """In the order of the gains on code; a method that was not run on each text is left out."""
    page = importlib.import_module("arena_page")
    code = [
        ("bam", 1246, 0.05), ("alibi", 1246, 0.02), ("alibi", 1247, 0.9),
        ("kerple_log", 1246, 0.03), ("rpe", 1246, 0.04),
    ]  # fmt: skip
    prose = [
        arena_run("alibi", 1246, 0.02, 30.0, 20.0), arena_run("bam", 1246, -0.03, 40.0, 2000.0),
        arena_run("kerple_log", 1246, 0.02, 35.0, 31.0, exact=0.005),
        arena_run("kerple_log", 1247, 0.5, 36.0, 32.0),
    ]  # fmt: skip
    texts = {
        "code": pd.DataFrame([arena_run(*each) for each in code]),
        "prose": pd.DataFrame(prose),
    }
    gains = page.gains_on_texts(texts)
    assert gains.columns.tolist() == [
        "method", "on code", "intervals on code", "on prose", "intervals on prose",
    ]  # fmt: skip
    assert gains.to_numpy().tolist() == [
        ["`bam`", "0.0500", "above 0", "-0.0300", "below 0"],
        ["`kerple_log`", "0.0300", "above 0", "0.0050", ""],
        ["`alibi`", "0.0200", "above 0", "0.0200", "above 0"],
    ]
    models = page.models_on_texts(texts)
    assert models.columns.tolist() == [
        "method", "prose: perplexity at 128", "prose: perplexity at 2,048", "prose: places",
    ]  # fmt: skip
    assert models.to_numpy().tolist() == [
        ["`bam`", "40.00", "2,000", 9],
        ["`kerple_log`", "35.00", "31.00", 9],
        ["`alibi`", "30.00", "20.00", 9],
    ]


def table_of(runs):
    """Return rows of results.csv for {(task, seed): shares of right answers at 10, 20, 40}."""
    rows = [
        {
            "length": length, "metric": metric, "value": value if metric == "exact" else 0.0,
            "cell": f"{task}-none-{seed}", "task": task, "embedding": "none", "seed": seed,
            "folder": "runs",
        }
        for (task, seed), values in runs.items()
        for length, value in zip((10, 20, 40), values, strict=True)
        for metric in ("exact", "token")
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_a_run_learns_and_generalizes_by_its_score(tmp_path):
    """The score of parity leaves out what guessing gives: 90% right is 0.8, 70% right is 0.4."""
    runs = {
        ("parity", 1): (0.9, 0.7, 0.5),  # exactly at both limits
        ("parity", 2): (0.9, 0.69, 0.5),
        ("parity", 3): (0.89, 0.89, 0.89),  # not learnt, so it cannot generalize
        ("copy", 1): (1.0, 0.5, 0.0),
        ("copy", 2): (0.8, 0.39, 0.1),
        ("copy", 3): (0.79, 0.79, 0.2),
    }
    table_of(runs).to_csv(tmp_path / "results.csv", index=False)
    arena_tasks = importlib.import_module("arena_tasks")
    assert arena_tasks.main([str(tmp_path)]) == 0
    scores = pd.read_csv(tmp_path / "scores.csv")
    assert list(zip(scores.task, scores.seed, strict=True)) == list(runs)
    assert scores.score_10.tolist() == pytest.approx([0.8, 0.8, 0.78, 1.0, 0.8, 0.79])
    assert scores.score_40.tolist() == pytest.approx([0, 0, 0.78, 0, 0.1, 0.2])
    assert scores.learnt.tolist() == [True, True, False, True, True, False]
    assert scores.generalizes.tolist() == [True, False, False, True, False, False]
    parity, copy = pd.read_csv(tmp_path / "counts.csv").to_dict("records")
    assert (parity["task"], parity["runs"], parity["learnt"]) == ("parity", 3, 2)
    assert parity["generalizes"] == 1 == copy["generalizes"] and copy["learnt"] == 2
    assert parity["score_20"] == pytest.approx((0.4 + 0.38 + 0.78) / 3, abs=1e-4)
    assert copy["score_40"] == pytest.approx(0.1, abs=1e-4)
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_plot_for_each_task_and_a_curve_for_each_embedding():
    results = table_of({("copy", 1): (1.0, 0.5, 0.0), ("parity", 1): (0.9, 0.7, 0.5)})
    other = results.assign(embedding="alibi", cell=results.cell + "2")
    arena_tasks = importlib.import_module("arena_tasks")
    plots = arena_tasks.drawn(arena_tasks.scored(pd.concat([results, other]))).axes
    assert [axes.get_xlabel() for axes in plots] == ["length of copy", "length of parity"]
    for axes in plots:
        assert [line.get_label() for line in axes.lines] == ["none", "alibi"]
    assert plots[1].lines[0].get_ydata() == pytest.approx([0.8, 0.4, 0.0])


def test_a_claim_of_the_paper_needs_every_pair(monkeypatch, tmp_path):
    """Pairs of the same text and seed; a side is a perplexity, a change or a windowed twin."""
    claims = importlib.import_module("arena_claims")
    code = [
        arena_run("kerple_log", 1, 0.02, last=9.0), arena_run("alibi", 1, -0.01, last=9.5),
        arena_run("kerple_log", 2, 0.03, last=9.6), arena_run("alibi", 2, 0.01, last=9.5),
        arena_run("kerple_log", 3, 0.01, last=1.0),  # no alibi with this seed
    ]  # fmt: skip
    prose = [
        arena_run("kerple_log", 1, 0.001, 20.0, 19.0), arena_run("alibi", 1, 0.1, 30.0, 20.0),
    ]  # fmt: skip
    for folder, rows in (("code", code), ("prose", prose)):
        (tmp_path / folder).mkdir()
        pd.DataFrame(rows).to_csv(tmp_path / folder / "runs.csv", index=False)
    wanted = {
        ("kerple_log at 2048", "alibi at 2048"): ("1 of 2", "incomplete", "1 of 1"),
        ("kerple_log at 128", "alibi at 128"): ("0 of 2", "incomplete", "1 of 1"),  # 10 and 10
        ("change of alibi", "change of kerple_log"): ("1 of 2", "incomplete", "1 of 1"),
        ("change of kerple_log", "change of alibi"): ("1 of 2", "incomplete", "0 of 1"),
        ("kerple_log", "windowed twin of kerple_log"): ("3 of 3", "supported", "1 of 1"),
        ("alibi", "windowed twin of alibi"): ("1 of 2", "incomplete", "1 of 1"),
        ("kerple_log at 128", "kerple_log at 2048"): ("0 of 3", "contradicted", "0 of 1"),
        ("kerple_log at 2048", "kerple_log at 512"): ("2 of 3", "undecided", "0 of 1"),
        ("rpe at 128", "alibi at 128"): ("0 of 0", "incomplete", "0 of 0"),
    }
    table = pd.DataFrame([*wanted], columns=["lower", "higher"])
    table.to_csv(tmp_path / "claims.csv", index=False)
    monkeypatch.setattr(claims, "CLAIMS", tmp_path / "claims.csv")
    assert claims.main([str(tmp_path / "code"), str(tmp_path / "prose")]) == 0
    found = pd.read_csv(tmp_path / "code" / "claims.csv")
    assert [*zip(found.code, found.verdict, found.prose, strict=True)] == [*wanted.values()]
    assert found.difference[0] == pytest.approx(math.log(9.5 / 9 * 9.5 / 9.6) / 2, rel=1e-3)
    assert found.difference[4] == pytest.approx(0.02)
