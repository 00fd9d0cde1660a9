"""The suite's intervals, key tokens, reports and titles from numbers that are known."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron import pictures
from megatron.config import load_config
from megatron.data.errors import DataError
from megatron.engine.build import tokenizer_of
from megatron.evaluation.suite import (
    all_measures,
    intervals,
    key_tokens,
)
from megatron.evaluation.suite.intervals import Estimate, estimate
from megatron.evaluation.suite.measure import Measure, Row, Sample, read_sample
from megatron.evaluation.suite.suite_report import Report, write_report
from megatron.parallel.groups import build_groups
from megatron.positional import load
from tests.evaluation.figures import band_of, curves_of, names_of
from tests.helpers.jobs import write_config
from tests.helpers.shards import write_documents

CPU = build_groups(torch.device("cpu"))


@pytest.mark.parametrize(
    ("low", "high", "effect", "surely"),
    [
        (0.06, 0.2, "gain", "gain"), (0.05, 0.2, "gain", "unclear"),
        (-0.2, -0.06, "loss", "loss"), (-0.2, -0.05, "loss", "unclear"),
        (-0.05, 0.05, "none", "none"), (0.01, 0.04, "none", "none"),
        (-0.01, 0.06, "unclear", "unclear"), (-0.06, 0.0, "unclear", "unclear"),
        (math.nan, math.nan, "unclear", "unclear"),
    ],
)  # fmt: skip
def test_an_interval_says_what_the_effect_is(low, high, effect, surely):
    found = Estimate(0.0, low, high, 3)
    assert (found.effect(0.05), found.effect(0.05, surely=True)) == (effect, surely)


def test_estimates_have_two_to_six_digits_and_perplexities():
    assert str(Estimate(12.3456, 1.0, 20.0, 3)) == "12.3456 [1.0000, 20.0000]"
    assert str(Estimate(1e-9, -2e-9, 2e-9, 3)) == "0.000000 [-0.000000, 0.000000]"
    found = Estimate(1.0, 0.0, 2.0, 3).perplexity
    assert (found.value, found.low, found.high, found.documents) == (
        pytest.approx(math.e), 1.0, pytest.approx(math.e**2), 3
    )  # fmt: skip


def test_intervals_are_scipys_at_the_level_of_few_documents_or_percentiles(monkeypatch):
    """Student's quantiles with 7 degrees of freedom: 2.36462 at 2.5%, 4.02934 at 0.25%.

    The first, times sqrt(8 / 7), is 2.52789, so the normal tail is 5.737e-3.
    """
    asked, found = {}, [(0.5, 0.75), (math.nan, 1.0), (1.0, math.nan)]

    def bootstrap(data, statistic, **options):
        asked.update(options, value=statistic(*data))
        return SimpleNamespace(
            confidence_interval=found.pop(0), bootstrap_distribution=np.arange(1001.0)
        )

    monkeypatch.setattr(intervals.stats, "bootstrap", bootstrap)
    totals, counts = np.array([2.0, 9.0] * 4), np.array([1.0, 3.0] * 4)
    documents = np.arange(8)
    assert estimate(totals, counts, documents) == Estimate(11 / 4, 0.5, 0.75, 8)
    assert asked["confidence_level"] == pytest.approx(1 - 2 * 5.737e-3, abs=2e-6)
    assert (asked["n_resamples"], asked["paired"]) == (2000, True)
    assert asked["value"] == 11 / 4
    for _ in range(2):
        both = estimate(totals, counts, documents)
        assert (both.low, both.high) == pytest.approx((5.737, 994.263), abs=2e-3)
    found[:] = [(0.5, 0.75), (math.nan, 1.0)]
    estimate(totals, counts, documents, comparisons=10)
    joint = estimate(totals, counts, documents, comparisons=10)
    assert asked["confidence_level"] == pytest.approx(1 - 2 * 5.737e-3, abs=2e-6)
    wider = 4.02934 / 2.36462
    assert joint.low == pytest.approx(2.75 + wider * (5.737 - 2.75), abs=0.02)
    assert joint.high == pytest.approx(2.75 + wider * (994.263 - 2.75), abs=0.02)


@pytest.mark.parametrize(("documents", "comparisons"), [(8, 1), (16, 1), (8, 18)])
def test_an_interval_misses_the_mean_of_few_documents_as_rarely_as_it_says(documents, comparisons):
    """Plain BCa intervals of 8 documents miss it on each side in 6% of the samples.

    Of 18 intervals, each of which had the resamples of a joint level, 0.7% did, instead of 0.14%.
    """
    rng = np.random.default_rng(3)
    samples = rng.normal(size=(1200, documents))
    found = [
        estimate(each, np.ones(documents), np.arange(documents), comparisons=comparisons)
        for each in samples
    ]
    missed = np.array([[each.low > 0, each.high < 0] for each in found]).mean()
    nominal = 0.025 / comparisons
    assert missed < 1.4 * nominal + 3 * math.sqrt(nominal / 2400)


def test_the_memory_of_a_bootstrap_changes_no_interval(monkeypatch):
    values = np.random.default_rng(0).gamma(2.0, size=300)
    whole = estimate(values, np.ones(300), np.arange(300))
    monkeypatch.setattr(intervals, "BATCH", 300 * 37)
    assert estimate(values, np.ones(300), np.arange(300)) == whole


def test_documents_without_counts_are_left_out():
    found = estimate(np.array([4.0, 9.0, 8.0]), np.array([2.0, 0.0, 4.0]), np.array([5, 6, 7]))
    assert found == Estimate(2.0, 2.0, 2.0, 2)
    alone = estimate(np.array([4.0, 9.0]), np.array([2.0, 0.0]), np.array([5, 6]))
    assert (alone.value, alone.documents) == (2.0, 1) and math.isnan(alone.high)


def test_key_tokens_gain_more_than_2_nats_and_have_less_than_2():
    full = np.array([[1.0, 1.9, 2.0, 1.0, 1.0]])
    twin = np.array([[3.1, 3.95, 9.0, 3.0, 0.5]])
    gain = key_tokens.judged_gain(full, twin)
    assert gain[0].tolist() == [pytest.approx(2.1), pytest.approx(2.05), -math.inf, 2.0, -0.5]
    sample = Sample(np.zeros((1, 6), int), np.arange(1), 0, (5,), 1)
    found = key_tokens.key_tokens(sample, full, twin, gain, "me")
    assert found.rows[0].also == {"tokens": 2, "share": 2 / 5}
    assert found.says == (
        "2 key tokens (a part of 0.4): their perplexity is 4.26, and 34.0 within the window "
        "(the judge is me)."
    )
    same_length = Sample(np.zeros((1, 6), int), np.arange(1), 5, (5,), 1)
    assert key_tokens.key_tokens(same_length, full, twin, gain, "me").rows == []


def test_the_report_has_tables_pictures_and_numbers(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: figures.append((figure, path.name)))
    values = [Estimate(v, v - 1, math.nan if v == 3 else v + 2, 3) for v in (3.0, 2.0, 4.0, 5.0)]
    rows = [
        Row({"length": length, "depth": depth}, value, {"loss": 1234567, "share": 0.123456})
        for (length, depth), value in zip(
            [(64, 0.5), (1024, 0.5), (64, 0.9), (1024, 0.9)], values, strict=True
        )
    ]
    two = Measure("two", "Two rows", "nats", "It says two.", rows[:2])
    four = Measure("four", "Four rows", "nats", "It says four.", rows, answer=[1, 2])
    bare = Measure("bare", "No picture", "nats", "It says bare.", rows, drawn=False)
    none = Measure("none", "No rows", "nats", "Not measured.", [])
    about = {"distance_scale": 1.0, "split": "valid", "step": 7, "code": "abc"}
    report = Report(
        "A model", about, {"text": "t", **about}, ["First.", "Second."], [two, four, bare, none]
    )
    write_report(report, tmp_path / "new" / "suite", 128)
    folder = tmp_path / "new" / "suite"
    names = {path.name for path in folder.iterdir()}
    assert names == {"report.md", "report.json", "two.csv", "four.csv", "bare.csv"}
    page = (folder / "report.md").read_text()
    assert page.startswith(
        "# A model\n\n**First.**  \n**Second.**  \n\n- text: t\n- distance_scale: "
    )
    assert "| length | depth | nats | interval | documents | loss | share |\n|---:|---:|" in page
    assert "| 1,024 | 0.5 | 2.0000 | 1.0000 to 4.0000 | 3 | 1,234,567 | 0.1235 |" in page
    assert "![Four rows](four.png)" in page and "two.png" not in page
    assert "Intervals have a level of 95%, by bootstrap over documents (or, for induction" in page
    assert (folder / "report.json").read_text().startswith('{\n "title": "A model",\n "verdict": [')
    content = json.loads((folder / "report.json").read_text())
    assert content["measures"]["none"] == {
        "unit": "nats", "says": "Not measured.", "answer": None, "rows": [],
    }  # fmt: skip
    assert content["measures"]["four"]["answer"] == [1, 2]
    assert content["measures"]["two"]["rows"][0]["high"] is None
    assert content["measures"]["two"]["rows"][1]["high"] == 4.0
    assert (folder / "two.csv").read_text().splitlines()[1].endswith(",1.0,valid,7,abc")
    [(figure, name)] = figures
    [axes] = figure.axes
    assert name == "four.png" and figure.get_suptitle().startswith("Four rows\nA model, 20")
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "length (tokens)"
    assert [each.get_ydata().tolist() for each in curves_of(axes)] == [[3.0, 2.0], [4.0, 5.0]]
    assert names_of(axes) == ["depth 0.9", "depth 0.5"]
    assert band_of(axes, 1) == {(64, 3.0), (64, 6.0), (1024, 4.0), (1024, 7.0)}
    assert band_of(axes, 0) == {(64, 2.0), (64, 3.0), (1024, 1.0), (1024, 4.0)}


def test_files_of_an_earlier_report_are_not_taken_for_those_of_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "save", lambda figure, path: path.write_text("new"))
    rows = [Row({"length": length}, Estimate(2.0, 1.0, 3.0, 9)) for length in (64, 128, 256)]
    for name in ("far", "heads_layer1"):
        for ending in (".csv", ".png", ".svg"):
            (tmp_path / f"{name}{ending}").write_text("old")
    (tmp_path / "extrapolation.csv").write_text("not the suite's")
    measures = [Measure("kept", "K", "nats", "K.", rows), Measure("far", "F", "nats", "Not.", [])]
    write_report(Report("A model", {}, {}, ["First."], measures), tmp_path, 64)
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.md", "report.json", "kept.csv", "kept.png", "extrapolation.csv",
        "far.csv.previous", "heads_layer1.csv.previous",
    }  # fmt: skip
    assert (tmp_path / "far.csv.previous").read_text() == "old"


@pytest.mark.parametrize(
    ("scale", "stretched"), [(1.0, ""), (0.5, " at distances x 0.5"), (2.0, " at distances x 2")]
)
def test_the_title_and_the_facts(tmp_path, monkeypatch, capsys, scale, stretched):
    texts = np.arange(200).reshape(5, 40)
    write_documents(tmp_path / "t", [np.append(text, 256) for text in texts])
    keys = {"eval_lengths": [32, 16], "train_batch_size": 8, "eval_distance_scale": scale}
    keys |= {"split": "2,3,0"}
    config = load_config([write_config(tmp_path / "c.yml", str(tmp_path / "t"), **keys)])
    opened = SimpleNamespace(
        model=SimpleNamespace(pos=load("alibi")),
        tokenizer=tokenizer_of(config),
        config=config,
        said=lambda: "opened",
        saved=SimpleNamespace(step=70, path="a/checkpoint"),
    )
    monkeypatch.setattr(all_measures, "open_run", lambda *given: opened)
    found = Measure("m", "M", "nats", "It says.", [])
    monkeypatch.setattr(all_measures, "measure_with_progress", lambda *given: [found])
    monkeypatch.setattr(all_measures, "verdict", lambda measures: ["A verdict."])
    report = all_measures.run_suite(config, tmp_path / "run")
    assert report.title == f"alibi, trained at 16 tokens{stretched}"
    assert report.facts["text"] == f"valid of {tmp_path}/t"
    assert report.facts["sequences"] == "3 of 32 tokens, from 3 different documents"
    assert (report.facts["step"], report.facts["checkpoint"]) == (70, "a/checkpoint")
    folder = tmp_path / "run" / "suite"
    assert capsys.readouterr().out.splitlines() == [
        "opened", report.title, "  It says.", "A verdict.",
        f"written to {folder}: report.md, and tables and pictures",
    ]  # fmt: skip
    all_measures.run_suite(config, tmp_path / "run", out=tmp_path / "other")
    assert (tmp_path / "other" / "report.md").exists()
    task = load_config([
        write_config(
            tmp_path / "d.yml", "builtin:copy", tokenizer_type="TaskTokenizer", train_batch_size=8,
            task_options={"max_length": 4}, eval_lengths=[4],
        )
    ])  # fmt: skip
    with pytest.raises(DataError, match="data_path is a length task, copy"):
        all_measures.run_suite(task, tmp_path / "run")


def test_documents_of_exactly_the_size_are_read(tmp_path):
    """A sequence of 15 inputs has 16 tokens; its document's last token ends the document."""
    sizes = (17, 16, 18)
    shards = write_documents(
        tmp_path / "t", [np.append(np.arange(n - 1) + 100 * i, 65000) for i, n in enumerate(sizes)]
    )
    sample = read_sample(shards, (0, 3), (7, 15), train_length=8, tokens=100, eod=65000)
    assert sample.sequences_nT.shape == (2, 16) and sample.documents.tolist() == [0, 2]
    assert sample.sequences_nT[0].tolist() == list(range(16))
    assert sample.sequences_nT[1, 0] in (200, 201)
