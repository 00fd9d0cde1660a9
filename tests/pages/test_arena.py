"""Test the tables of the arena and of its length tasks by hand."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import subprocess
import sys

import pandas as pd
import pytest
from scipy.stats import t

from megatron.evaluation.suite.all_measures import run_suite
from tests.helpers.jobs import write_config, write_shards
from tests.helpers.launch import call
from tests.helpers.paths import ROOT
from tools.experiments.grid import read_grid

SMALL = {
    "train_micro_batch_size_per_gpu": 4, "train_iters": 1, "seq_length": 16, "eval_iters": 0,
    "split": "50,25,25", "eval_split": "test", "eval_suite_tokens": 512, "eval_tokens": 256,
}  # fmt: skip


@pytest.fixture(name="arena")
def _arena(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "lab")
    return importlib.import_module("arena")


def test_the_arenas_tests_share_one_variance(arena):
    """The errors are ±0.5, with one degree of freedom: variance 1. The seeds' means are -1 and 1.

    So the variance of a value is 2 + 1/2, the mean of both methods' own variances, 0.5 and 4.5.
    With one degree of freedom, a t value T has the one-sided p value atan(1 / T) / pi.
    """
    values = pd.DataFrame({1: [3.0, 0.0], 2: [4.0, 3.0]}, index=["a", "b"])
    freedom = 2.5**2 / (2**2 + 0.5**2)
    one = [t.sf(mean / math.sqrt(2.5 / 2), freedom) for mean in (3.5, 1.5)]
    found = arena.p_values(values)
    assert found["a"] == pytest.approx(2 * one[0]) and found["b"] == pytest.approx(one[1])
    [other] = arena.p_values(values, "b").items()
    assert other == ("a", pytest.approx(2 * math.atan(1 / 2.0) / math.pi))
    assert arena.p_values(values.iloc[:1]).empty and arena.p_values(values, "absent").empty


def arena_run(method, seed, gain, first=10.0, last=9.0):
    return {
        "method": method, "seed": seed, "perplexity_128": first, "perplexity_512": 9.5,
        "perplexity_2048": last, "documents": 21, "gain": gain, "gain_low": gain - 0.01,
        "gain_high": gain + 0.01, "headroom": 0.2, "share": gain / 0.2, "places": 9,
        "induction": 1024,
    }  # fmt: skip


def test_a_harmed_method_takes_no_part_in_the_arenas_tests(arena):
    """Its gain is below -0.05 nats, or its perplexity rises by more than 5%."""
    rows = [
        arena_run(name, seed, gain + seed / 1000 * (1 + place), last=last)
        for place, (name, gain, last) in enumerate(
            [("kerple_log", 0.02, 9.0), ("alibi", 0.0, 10.4), ("low", -0.07, 9.0),
             ("rises", 0.03, 10.6), ("short", 0.01, 9.0)]
        )
        for seed in (1, 2, 3) if (name, seed) != ("short", 3)
    ]  # fmt: skip
    runs = pd.DataFrame(rows)
    runs.loc[(runs.method == "alibi") & (runs.seed == 2), "perplexity_128"] = 10.1
    found = arena.compared(runs).set_index("method")
    assert found.index.tolist() == ["rises", "kerple_log", "short", "alibi", "low"]
    assert found.harmed.to_dict() == {
        "rises": True, "kerple_log": False, "short": False, "alibi": False, "low": True
    }  # fmt: skip
    assert found.gain["kerple_log"] == pytest.approx(0.022) and found.seeds["short"] == 2
    assert found.share["kerple_log"] == pytest.approx(0.11)
    assert found.change["rises"] == pytest.approx(math.log(1.06))
    assert found.level["alibi"] == pytest.approx(math.log(10) * 2 / 3 + math.log(10.1) / 3)
    fair = runs[runs.method.isin(["kerple_log", "alibi"])]
    alone = arena.p_values(fair.pivot(index="method", columns="seed", values="gain"))
    assert found.gain_p.dropna().to_dict() == pytest.approx(alone.to_dict())
    assert found.gain_differs_p.dropna().index.tolist() == ["alibi"]
    assert found.level_differs_p.dropna().index.tolist() == ["rises", "alibi", "low"]
    (axes,) = arena.gains(runs).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == found.index[::-1].tolist()
    harmed = arena.compared(runs.assign(gain=runs.gain - 0.08 * (runs.method == "kerple_log")))
    assert harmed.gain_differs_p.isna().all() and harmed.level_differs_p.notna().sum() == 3


def small_grid(folder, method):
    grid = {
        "runs": str(folder / "runs"), "seeds": [1], "lengths": [16, 64],
        "configs": [str(write_config(folder / "c.yml", write_shards(folder), **SMALL))],
        "axes": {"embedding": [method]}, "overrides": {"pos_emb": "{embedding}"},
    }  # fmt: skip
    (folder / "grid.yml").write_text(json.dumps(grid))


OUTSIDER = """
from megatron.positional import PositionalEmbedding, ThetaParameter


class Hyperbola(PositionalEmbedding):  # b(d) = -a d / (1 + p d)
    parameters = (ThetaParameter("a", low=0.0), ThetaParameter("p", low=0.0))

    def bias(self, theta_HN, d):
        d, a, p = self.columns(theta_HN, d)
        return -a * d / (1 + p * d)
"""


def test_one_file_and_one_line_enter_an_outsiders_method(tmp_path):
    checkout = tmp_path / "checkout"
    for name in ("megatron", "tools", "configs", "docs/lab"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    shutil.copy(ROOT / "train.py", checkout)
    (checkout / "megatron" / "positional" / "outsider.py").write_text(OUTSIDER)
    small_grid(tmp_path, "outsider")
    environ = os.environ | {"PYTHONPATH": str(checkout)}
    for script, *options in (["tools/sweep.py"], ["docs/lab/arena.py", "--out", "out"]):
        command = [sys.executable, script, tmp_path / "grid.yml", *options]
        subprocess.run(command, cwd=checkout, env=environ, check=True)
    [method] = pd.read_csv(checkout / "out" / "methods.csv").to_dict("records")
    assert method["method"] == "outsider" and math.isfinite(method["gain"])


def test_a_run_is_measured_as_the_suite_measures_it(arena, tmp_path):
    """On an untrained model of the quickstart's size; the values are those of the suite."""
    small_grid(tmp_path, "kerple_log")
    call("tools/sweep.py", tmp_path / "grid.yml")
    (cell,) = read_grid(tmp_path / "grid.yml").cells
    given = [str(tmp_path / "grid.yml"), "--out", str(tmp_path / "out")]
    assert arena.main(given) == 0 and arena.main(given) == 0
    [run] = pd.read_csv(tmp_path / "out" / "runs.csv").to_dict("records")
    suite = run_suite(cell.config(), cell.folder)
    found = {measure.name: measure for measure in suite.measures}
    far = found["pointer"].rows[0].flat()
    assert (run["method"], run["seed"], run["documents"]) == ("kerple_log", 1, far["documents"])
    assert run["gain"] == pytest.approx(far["taken"], rel=1e-4, abs=1e-9)
    assert run["headroom"] == pytest.approx(far["value"], rel=1e-4)
    perplexities = [run["perplexity_16"], run["perplexity_64"]]
    of_suite = [row.estimate.value for row in found["by_length"].rows]
    assert perplexities == pytest.approx(of_suite, rel=1e-4)
    assert run["places"] == len(found["copy"].answer)
    assert run["induction"] == found["induction"].answer
    assert (tmp_path / "out" / "by_length.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_runs_that_are_measured_earlier_stay_in_order(arena, tmp_path):
    path = tmp_path / "runs.csv"
    columns = ["dose", "embedding", "seed", "value"]
    given = [("700", "a", 1, 0.5), ("1400", "a", 1, 0.25)]
    pd.DataFrame(given, columns=columns).to_csv(path, index=False)
    new = pd.DataFrame(
        [("1400", "b", 2, 1.0), ("700", "b", 2, 2.0), ("700", "b", 1, 3.0), ("700", "a", 1, 9.0)],
        columns=columns,
    )
    found = arena.with_earlier(new, path, ["dose", "embedding"])
    assert found.to_numpy().tolist() == [
        ["700", "a", 1, 9.0], ["700", "b", 1, 3.0], ["700", "b", 2, 2.0],
        ["1400", "a", 1, 0.25], ["1400", "b", 2, 1.0],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="has other columns: move it away"):
        arena.with_earlier(new.drop(columns="value"), path, ["dose", "embedding"])


@pytest.fixture(name="arena_tasks")
def _arena_tasks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "lab")
    return importlib.import_module("arena_tasks")


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


def test_a_run_learns_and_generalizes_by_its_score(arena_tasks, tmp_path):
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


def test_the_picture_has_a_plot_for_each_task_and_a_curve_for_each_embedding(arena_tasks):
    results = table_of({("copy", 1): (1.0, 0.5, 0.0), ("parity", 1): (0.9, 0.7, 0.5)})
    other = results.assign(embedding="alibi", cell=results.cell + "2")
    plots = arena_tasks.drawn(arena_tasks.scored(pd.concat([results, other]))).axes
    assert [axes.get_xlabel() for axes in plots] == ["length of copy", "length of parity"]
    for axes in plots:
        assert [line.get_label() for line in axes.lines] == ["none", "alibi"]
    assert plots[1].lines[0].get_ydata() == pytest.approx([0.8, 0.4, 0.0])


def test_a_claim_of_the_paper_needs_every_pair(monkeypatch, tmp_path):
    """Pairs of the same text and seed; a side is a perplexity, a change or a windowed twin."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "lab")
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
        ("kerple_log at 2048", "alibi at 2048"): (2, 3, "undecided"),
        ("kerple_log at 128", "alibi at 128"): (1, 3, "undecided"),  # 10 is not below 10
        ("change of alibi", "change of kerple_log"): (2, 3, "undecided"),
        ("change of kerple_log", "change of alibi"): (1, 3, "undecided"),
        ("kerple_log", "windowed twin of kerple_log"): (4, 4, "supported"),
        ("alibi", "windowed twin of alibi"): (2, 3, "undecided"),
        ("kerple_log at 128", "kerple_log at 2048"): (0, 4, "contradicted"),
        ("rpe at 128", "alibi at 128"): (0, 0, ""),
    }
    table = pd.DataFrame([*wanted], columns=["lower", "higher"])
    table.to_csv(tmp_path / "claims.csv", index=False)
    monkeypatch.setattr(claims, "CLAIMS", tmp_path / "claims.csv")
    assert claims.main([str(tmp_path / "code"), str(tmp_path / "prose")]) == 0
    found = pd.read_csv(tmp_path / "code" / "claims.csv", keep_default_na=False)
    assert [*zip(found.holds, found.runs, found.verdict, strict=True)] == [*wanted.values()]
