"""Test the measures, the labels and the tests of the arena by hand."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import time

import pandas as pd
import pytest

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
def _arena():
    return importlib.import_module("arena")


def arena_run(method, seed, gain, first=10.0, last=9.0, exact=None, width=0.01):
    exact = gain if exact is None else exact
    return {
        "method": method, "seed": seed, "perplexity_128": first, "perplexity_512": 9.5,
        "perplexity_2048": last, "documents": 21, "gain": gain, "gain_low": gain - width,
        "gain_high": gain + width, "exact": exact, "exact_low": exact - width,
        "exact_high": exact + width, "headroom": 0.2, "places": 9, "induction": 1024,
    }  # fmt: skip


def of_seeds(method, gains, **given):
    return [arena_run(method, seed, gain, **given) for seed, gain in enumerate(gains, 1)]


def test_a_label_needs_both_gains_of_each_seed(arena):
    found = {
        name: arena.compared(pd.DataFrame(rows)).label.item()
        for name, rows in {
            "gains": of_seeds("a", (0.02, 0.03, 0.011)),
            "one seed": of_seeds("a", (0.02, 0.03, 0.009)),
            "one gain": of_seeds("a", (0.02, 0.03, 0.011), exact=0.009),
            "loses": of_seeds("a", (-0.02, -0.03, -0.011)),
            "one seed loses less": of_seeds("a", (-0.02, -0.03, -0.009)),
            "the twin lost its sink": of_seeds("a", (0.02, 0.03, 0.02), exact=-0.02),
            "no intervals": of_seeds("a", (0.02, 0.03, 0.02), width=math.nan),
        }.items()
    }
    assert found.pop("gains") == "gains" and found.pop("loses") == "loses"
    assert set(found.values()) == {"unclear"}


def test_the_arenas_tests_are_t_tests_over_seeds(arena):
    """With two degrees of freedom, |t| = T has the two-sided p value 1 - T / sqrt(T^2 + 2)."""

    def two_sided(gaps):
        mean = sum(gaps) / 3
        variance = sum((each - mean) ** 2 for each in gaps) / 2
        value = abs(mean) / math.sqrt(variance / 3)
        return 1 - value / math.sqrt(value**2 + 2)

    gains = {
        "kerple_log": (0.02, 0.021, 0.025), "bam": (0.03, 0.03, 0.036),
        "fire": (0.02, 0.02, -0.02), "sandwich": (-0.02, -0.02, -0.021),
    }  # fmt: skip
    rows = [row for name, given in gains.items() for row in of_seeds(name, given)]
    runs = pd.DataFrame(rows)
    runs.loc[(runs.method == "bam") & (runs.seed == 2), "perplexity_128"] = 10.1
    runs.loc[(runs.method == "fire") & (runs.seed == 3), "perplexity_128"] = 10.2
    runs.loc[(runs.method == "kerple_log") & (runs.seed > 1), "headroom"] = 0.1
    found = arena.compared(runs, tests=True).set_index("method")
    assert found.index.tolist() == ["bam", "kerple_log", "fire", "sandwich"]
    assert found.label.to_dict() == {
        "bam": "gains", "kerple_log": "gains", "fire": "unclear", "sandwich": "loses"
    }  # fmt: skip
    above = sorted(two_sided(gains[name]) / 2 for name in ("bam", "kerple_log"))
    assert sorted(found.gain_p)[:2] == pytest.approx(
        [4 * above[0], max(4 * above[0], 3 * above[1])]
    )
    assert found.gain_p[["fire", "sandwich"]].tolist() == [1, 1]
    gaps = {
        name: two_sided([a - b for a, b in zip(given, gains["kerple_log"], strict=True)])
        for name, given in gains.items() if name != "kerple_log"
    }  # fmt: skip
    least, middle, most = sorted(gaps, key=lambda name: gaps[name])
    holm = [3 * gaps[least], 2 * gaps[middle], gaps[most]]
    holm = [min(1, max(holm[: n + 1])) for n in range(3)]
    assert found.gain_differs_p[[least, middle, most]].tolist() == pytest.approx(holm)
    assert found.rate.to_dict() == {
        "bam": "searched", "kerple_log": "searched", "fire": "searched",
        "sandwich": "of its family",
    }  # fmt: skip
    both = 2 * two_sided([0, 0, 1])  # of one seed's difference, whatever its size
    assert found.level_differs_p.dropna().to_dict() == pytest.approx({"bam": both, "fire": both})
    assert found.gain["kerple_log"] == pytest.approx(0.022)
    assert found.least_sd["bam"] == pytest.approx(math.sqrt(0.002**2 * 2 + 0.004**2) / math.sqrt(2))
    assert found.share["bam"] == pytest.approx((0.03 / 0.2 + 0.03 / 0.1 + 0.036 / 0.1) / 3)
    assert found.share[["fire", "sandwich"]].isna().all()  # they are not labelled "gains"
    assert found.change["sandwich"] == pytest.approx(math.log(0.9))
    assert found.level["bam"] == pytest.approx(math.log(10) + math.log(1.01) / 3)


def test_harm_of_the_twin_alone_is_no_rank(arena):
    """A large gain with a small `exact` counts as the small one, in the order and in the tests."""
    smaller = enumerate((0.015, 0.016, 0.014), 1)
    rows = [
        *of_seeds("kerple_log", (0.02, 0.021, 0.025)), *of_seeds("bam", (0.03, 0.031, 0.05)),
        *[arena_run("sinusoidal", seed, gain=0.5, exact=exact) for seed, exact in smaller],
    ]  # fmt: skip
    found = arena.compared(pd.DataFrame(rows), tests=True).set_index("method")
    assert found.index.tolist() == ["bam", "kerple_log", "sinusoidal"]
    assert found.label.tolist() == ["gains"] * 3
    assert found.gain["sinusoidal"] == 0.5 and found.least["sinusoidal"] == pytest.approx(0.015)
    rows[6:] = of_seeds("sinusoidal", (0.015, 0.016, 0.014))
    both = arena.compared(pd.DataFrame(rows), tests=True).set_index("method")
    columns = ["least", "gain_p", "gain_differs_p"]
    pd.testing.assert_frame_equal(found[columns], both[columns])


def test_a_method_without_all_seeds_has_no_label_and_no_test(arena):
    rows = [
        *of_seeds("kerple_log", (0.02, 0.021, 0.025)), *of_seeds("bam", (0.03, 0.03)),
        *of_seeds("rpe", (0.03, 0.03, 0.032)),
    ]  # fmt: skip
    found = arena.compared(pd.DataFrame(rows))
    assert "gain_p" not in found and found.label.tolist() == ["gains", "", "gains"]
    found = arena.compared(pd.DataFrame(rows), tests=True).set_index("method")
    assert found.seeds["bam"] == 2 and found.loc["bam"].filter(like="_p").isna().all()
    alone = arena.compared(pd.DataFrame([*rows[:3], *rows[5:]]), tests=True).set_index("method")
    assert found.gain_p["rpe"] == alone.gain_p["rpe"] < 0.05
    found = arena.compared(pd.DataFrame(rows[3:]), tests=True)  # without the reference
    assert found.gain_differs_p.isna().all() and found.share.isna().all()


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
    start, checkout = time.monotonic(), tmp_path / "checkout"
    for name in ("megatron", "tools", "configs", "docs/lab"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, checkout / name, ignore=ignored)
    shutil.copy(ROOT / "train.py", checkout)
    (checkout / "megatron" / "positional" / "outsider.py").write_text(OUTSIDER)
    for name in ("arena", "arena_rates"):
        grid = checkout / "configs" / "paper" / f"{name}.yml"
        axis = "  embedding:\n"
        grid.write_text(grid.read_text().replace(axis, f"{axis}    outsider:\n"))
    small_grid(tmp_path, "outsider")
    environ = os.environ | {"PYTHONPATH": str(checkout)}
    for script, *options in (["tools/sweep.py"], ["docs/lab/arena.py", "--out", "out"]):
        command = [sys.executable, script, tmp_path / "grid.yml", *options]
        subprocess.run(command, cwd=checkout, env=environ, check=True)
    for name in ("arena", "arena_rates"):
        command = [sys.executable, "tools/sweep.py", f"configs/paper/{name}.yml", "--list"]
        command += ["--only", "*outsider*"]
        done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.count("outsider") == 3, done
    assert time.monotonic() - start < 600
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
    assert not (tmp_path / "out" / "missing.csv").exists()
    suite = run_suite(cell.config(), cell.folder)
    found = {measure.name: measure for measure in suite.measures}
    far = found["pointer"].rows[0].flat()
    assert (run["method"], run["seed"], run["documents"]) == ("kerple_log", 1, far["documents"])
    assert run["gain"] == pytest.approx(far["taken"], rel=1e-4, abs=1e-9)
    assert run["headroom"] == pytest.approx(far["value"], rel=1e-4)
    exact = found["exact_context"].rows[0].estimate.value
    assert run["exact"] == pytest.approx(exact, rel=1e-4, abs=1e-9)
    perplexities = [run["perplexity_16"], run["perplexity_64"]]
    of_suite = [row.estimate.value for row in found["by_length"].rows]
    assert perplexities == pytest.approx(of_suite, rel=1e-4)
    assert run["places"] == len(found["copy"].answer)
    assert run["induction"] == found["induction"].answer
    assert (tmp_path / "out" / "by_length.png").read_bytes().startswith(b"\x89PNG")
    grid = json.loads((tmp_path / "grid.yml").read_text())
    grid["lengths"] = [16, 32]
    (tmp_path / "grid.yml").write_text(json.dumps(grid))
    assert arena.main(given) == 1  # its measures are those of other lengths
    grid["lengths"], grid["seeds"] = [16, 64], [1, 2]
    (tmp_path / "grid.yml").write_text(json.dumps(grid))
    assert arena.main([*given, "--tests"]) == 0
    [missing] = pd.read_csv(tmp_path / "out" / "missing.csv").to_dict("records")
    assert missing == {"cell": "kerple_log-2", "reason": "is not finished"}


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
