"""Test that the numbers on the pages are those of the committed CSV and JSON files."""

from __future__ import annotations

import csv
import json
import re

import pandas as pd
import pytest

from tests.evaluation.suite.confusion import table
from tests.helpers.paths import ROOT
from tests.pages.figures.held import assert_rounded, one_line, rows


def test_perplexities_of_the_quickstart():
    table = rows(ROOT / "docs" / "lab" / "measurements.md", "Perplexity by length")
    embeddings = list(table[0])[2:]
    assert len(table) == 5 and len(embeddings) >= 6
    for embedding in embeddings:
        name = re.sub(r"\W+", "_", embedding)
        results = pd.read_csv(ROOT / "docs" / "quickstart" / f"extrapolation_{name}.csv")
        measured = results.set_index("length")
        for row in table:
            found = measured.loc[int(row["length"].replace(",", ""))]
            perplexity, error = row[embedding].split(" ± ")
            assert_rounded(perplexity, found.perplexity)
            assert_rounded(error, found.perplexity * found.stderr)


def test_baselines_of_the_quickstart():
    text = one_line(ROOT / "docs" / "lab" / "measurements.md")
    folder = ROOT / "docs" / "quickstart"
    baselines = pd.read_csv(folder / "context_baseline_kerple_log.csv")
    pieces, before, twin = baselines.itertuples()
    assert set(baselines.context) == {16} and "before each scored" in before.baseline
    for found in (pieces, before, twin):
        assert f"{found.perplexity:.2f} ± {found.perplexity * found.stderr:.2f}" in text
    log, rotary, alibi, cross, gate, fire = (
        pd.read_csv(folder / f"extrapolation_{name}.csv").set_index("length")
        for name in (
            *("kerple_log", "rotary", "alibi", "rotary_kerple_log"),
            *("kerple_log_forget_gate", "fire"),
        )
    )
    perplexity, bits = log.perplexity, log.bits_per_byte
    assert f", {100 * (before.perplexity / perplexity[2048] - 1):.0f}% above that with up" in text
    assert f"at 2,048 it is {100 * (1 - perplexity[2048] / perplexity[128]):.0f}% below" in text
    assert (perplexity < alibi.perplexity).all() and (perplexity < rotary.perplexity).all()
    assert f"ends {100 * (1 - cross.perplexity[2048] / perplexity[2048]):.0f}% below" in text
    assert (gate.perplexity < cross.perplexity)[256:].all()
    assert f"rises by {100 * (fire.perplexity[2048] / fire.perplexity[256] - 1):.0f}%" in text
    assert f"from {bits[128]:.3f} at length 128 to {bits[2048]:.3f} at 2,048" in text
    ends = rotary.bits_per_byte
    assert f"`rotary` from {ends[128]:.3f} to {ends[2048]:.3f}" in text
    start = one_line(ROOT / "docs" / "quickstart.md")
    ends = f"{perplexity[128]:.1f} at the training length to {perplexity[2048]:.1f} at 16 times"
    assert ends in start


def test_recipes_of_the_quickstart():
    table = rows(ROOT / "docs" / "lab" / "measurements.md", "The recipe")
    recipes = pd.read_csv(ROOT / "docs" / "quickstart" / "recipes.csv", dtype={"rate": str})
    assert len(table) == len(recipes)
    for row, found in zip(table, recipes.itertuples(), strict=True):
        precise = ", fp32" if found.precision == "fp32" else ""
        longest, ratio = found.perplexity_2048, found.perplexity_16_tokens / found.perplexity_2048
        assert list(row.values()) == [
            f"{found.vocabulary:,}",
            f"{found.optimizer}, {found.rate}{precise}",
            f"{found.batch} × {found.steps:,}",
            f"{found.bits_per_byte_128:.3f}",
            f"{found.bits_per_byte_2048:.3f}",
            f"{longest / found.perplexity_128:.3f}",
            f"{100 * (ratio - 1):.0f}%",
        ]


def test_report_on_the_use_of_context():
    page, folder = (
        ROOT / "docs" / "lab" / "suite.md",
        ROOT / "docs" / "quickstart" / "suite",
    )
    text = one_line(page).replace("> ", "")
    found = {path.stem: pd.read_csv(path) for path in folder.glob("*.csv")}
    table, by_context = (
        rows(page, "The quickstart's model", "| c, tokens read"),
        found["receptive_field"].set_index("context"),
    )
    loss, more = table
    del loss["c, tokens read"], more["c, tokens read"]
    for name, text_of_loss in loss.items():
        at = by_context.loc[int(name.replace(",", ""))]
        assert_rounded(text_of_loss, at.value)
        interval = f"{at.more_than_best:.3f} [{at.more_low:.3f}, {at.more_high:.3f}]"
        assert more[name] == (interval if at.more_than_best else "0")
    report = json.loads((folder / "report.json").read_text())
    assert len(report["verdict"]) == 11 and all(line in text for line in report["verdict"])
    pointer = found["pointer"].iloc[0]
    assert f"a simple pointer {pointer.value:.2f} nats, and the model takes" in text
    assert f"takes {100 * pointer.share:.0f}% of them" in text
    perplexity = found["by_length"].set_index("length")["value"]
    fall = f"from {perplexity[128]:.1f} at 128 to {perplexity[2048]:.1f} at 2,048"
    assert f"{fall} (documents" in text


def test_the_answers_about_planted_models():
    folder, page = ROOT / "docs" / "results", one_line(ROOT / "docs" / "lab" / "suite.md")
    with (folder / "suite_planted.csv").open() as file:
        found = list(csv.DictReader(file))
    assert table(found) in (ROOT / "docs" / "lab" / "suite.md").read_text()
    before = pd.read_csv(folder / "suite_planted_before.csv")["right"]
    assert f"{(before == 'no').sum()} of {len(before)} were wrong" in page
    missed = sum(row["right"] == "missed" for row in found)
    assert f"none of {len(found)} is false, and {missed} miss something" in page
    more = pd.read_csv(folder / "suite_planted_more_text.csv")
    assert f"all [{len(more)} answers]" in page and (more["right"] == "yes").all()
    assert {row["seed"] for row in found} < {*more.seed.astype(str)}


def test_times_of_the_benchmarks():
    text = one_line(ROOT / "docs" / "lab" / "measurements.md")
    measured = ROOT / "benchmarks" / "results"
    timings = json.loads((measured / "attention_cpu" / "attention.json").read_text())["timings"]
    blocked = {row["batch"]: row for row in timings if row["variant"] == "blocked"}
    one, two, four = (f"{blocked[batch]['forward_backward_ratio']:.2f}" for batch in (1, 2, 4))
    assert f"{one} of its time at batch size 1, {two} at 2, {four} at 4" in text
    times = pd.read_csv(measured / "data_prep.csv").set_index(["path", "workers"])
    ratio = times["ratio_to_per_document_1"]
    auto, gigatoken = (ratio[f"prepare_data.py, {name}", 2] for name in ("auto", "gigatoken"))
    assert f"two workers are {auto:.1f} times as fast" in text
    assert f"`--backend gigatoken` {gigatoken:.1f} times" in text


def test_shares_of_rounding():
    table = rows(
        ROOT / "docs" / "lab" / "measurements.md", r"How much of the long rows is rounding\?"
    )
    names = ("fp32", "bf16", "bf16_published")
    files = (ROOT / "docs" / "results" / "rounding" / f"{name}.csv" for name in names)
    fp32, *others = (pd.read_csv(file).set_index("length")["loss"] for file in files)
    assert len(table) == len(fp32)
    for row in table:
        length, loss, *shares = row.values()
        at = int(length.replace(",", ""))
        assert_rounded(loss, fp32[at])
        for share, other in zip(shares, others, strict=True):
            assert share == f"{1e4 * (other[at] - fp32[at]):+.1f}"


@pytest.mark.parametrize(("text", "value"), [("3.57", 3.581), ("1,380", 1381.0)])
def test_a_wrong_number_is_found(text, value):
    with pytest.raises(AssertionError):
        assert_rounded(text, value)
