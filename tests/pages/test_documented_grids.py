"""Test that the numbers of the hand-scale grids on the page are those of their CSV files."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tests.helpers.paths import ROOT
from tests.pages.figures.held import (
    HAND_SCALE,
    assert_rounded,
    means,
    one_line,
    perplexities,
    rows,
    scientific,
)
from tools.experiments.claims import Verdict
from tools.experiments.grid_report import change_of


@pytest.mark.parametrize(("heading", "folder"), [*HAND_SCALE, ("Beyond the paper", "terms")])
def test_perplexities_of_the_hand_scale_grid(heading, folder):
    table = rows(ROOT / "docs" / "lab" / "measurements.md", heading)
    measured = perplexities(folder)
    lengths = [name for name in table[0] if name.replace(",", "").isdigit()]
    names = [row["embedding"].replace(" + ", "+") for row in table]
    assert sorted(names) == sorted(measured["embedding"].unique())
    assert len(lengths) == measured["length"].nunique()
    for name, row in zip(names, table, strict=True):
        runs = measured[measured["embedding"] == name]
        assert int(row["seeds"]) == runs["seed"].nunique()
        for length in lengths:
            values = runs.loc[runs["length"] == int(length.replace(",", "")), "value"]
            mean, deviation = row[length].split(" ± ")
            assert_rounded(mean, values.mean())
            assert_rounded(deviation, values.std())


def test_percentages_beyond_the_paper():
    measured = means("terms")
    change = 100 * (measured / measured.loc["kerple_log"] - 1)
    text = (ROOT / "docs" / "lab" / "measurements.md").read_text().replace("\n", " ")
    slopes, sink = change.loc["alibi_learned"], change.loc["sink+kerple_log"]
    assert (
        f"{-slopes[128]:.1f}% below `kerple_log` at 128 and {-slopes[8192]:.1f}% at 8,192" in text
    )
    rotary = change.loc["rotary+kerple_log"]
    assert f"a sink by {-sink[128]:.1f}% at 128, rotary by {-rotary[128]:.1f}%" in text
    assert (
        f"{-sink[8192]:.1f}% below), and `rotary + kerple_log` is {rotary[8192]:.1f}% above" in text
    )
    sharper, gates = change.loc["log_n+kerple_log"], measured.loc["forget_gate+kerple_log"]
    assert sharper.min() > 0
    assert (gates > measured.loc[["forget_gate", "kerple_log"]].max()).all()
    alone = means("code").loc["rotary", 8192]
    assert f"`rotary` alone is at {alone:.2f} there." in text
    falls = measured[(measured.diff(axis=1).iloc[:, 1:] < 0).all(axis=1)]
    names = {"alibi_learned", "kerple_sum", "forget_gate", "forget_gate+kerple_log"}
    assert set(falls.index) == names and "Four embeddings improve" in text


@pytest.mark.parametrize(
    ("heading", "folder"),
    [*HAND_SCALE, ("Are two backends equal?", "backends")],
)
def test_verdicts_of_the_hand_scale_grids(heading, folder):
    text = (ROOT / "docs" / "lab" / "measurements.md").read_text().split(f"## {heading}\n")[1]
    items = re.split(r"\n## ", text)[0].replace("\n  ", " ").splitlines()
    verdicts = pd.read_csv(ROOT / "docs" / "results" / folder / "verdicts.csv")
    assert len(verdicts) and {*re.findall(r"(\d+)% interval", "".join(items))} == {"95"}
    for each in verdicts.itertuples():
        start = f"- {each.name}: **{each.word}**"
        change, interval = change_of(Verdict(each.name, each.claim, *each[3:]))
        numbers = f"({change}", interval
        found = [item for item in items if all(number in item for number in numbers)]
        found = [item for item in found if item.startswith(start)]
        assert found, each
        for p in re.findall(r"p = ([\d.e-]+)", found[0]):
            assert float(p) in (float(f"{each.p:.2g}"), float(f"{each.holm:.2g}"))


def rpe_on_shared_seeds(folder):
    """Return by how many percent `rpe` is above `kerple_log` at each length, on rpe's seeds."""
    found = perplexities(folder).pivot_table("value", ["embedding", "seed"], "length")
    rpe = found.loc["rpe"]
    return 100 * (rpe.mean() / found.loc["kerple_log"].loc[rpe.index].mean() - 1)


def test_percentages_of_the_hand_scale_grid():
    text = (ROOT / "docs" / "lab" / "measurements.md").read_text().replace("\n", " ")
    folder = ROOT / "docs" / "results" / "code"
    mean = means("code")
    power = 100 * (1 - mean.loc["kerple_power"] / mean.loc["kerple_log"])
    assert f"{power.min():.1f}% to {power.max():.1f}% below `kerple_log`" in text
    rotary = 100 * (mean.loc["rotary"] / mean.loc["rotary", 128] - 1)
    assert f"{rotary[512]:.0f}% worse at 512, and {rotary[2048]:.0f}% worse at 2,048" in text
    alibi = 100 * (mean.loc["alibi"] / mean.loc["kerple_log"] - 1)
    assert f"{alibi[128]:.0f}% above `kerple_log` at 128 and {alibi[8192]:.0f}% at 8,192" in text
    rpe = rpe_on_shared_seeds("code")
    said = f"{-rpe[128]:.1f}% below it at 128, {rpe[2048]:.1f}% above at 2,048 and {rpe[8192]:.0f}%"
    assert said in text
    theta = pd.read_csv(folder / "theta.csv")
    moved = 100 * theta.groupby(["embedding", "parameter"])["relative"].mean()
    log, power = moved["kerple_log"], moved["kerple_power"]
    assert f"`kerple_log` by {log['bias_p']:.0f}% of its start value" in text
    assert f"`bias_a` by {log['bias_a']:.0f}%" in text
    assert f"by {power['bias_p']:.0f}% and {power['bias_a']:.0f}%" in text
    assert f"the table of `rpe` by {moved['rpe', 'table']:.0f}%" in text


def test_percentages_on_prose():
    text = one_line(ROOT / "docs" / "lab" / "measurements.md").split("### On prose")[1]
    measured, mean = perplexities("prose"), means("prose")
    assert mean.loc["kerple_log"].is_monotonic_decreasing and "with every doubling up to" in text
    alibi, power, rotary = (
        100 * (mean.loc[name] / mean.loc["kerple_log"] - 1)
        for name in ("alibi", "kerple_power", "rotary")
    )
    rpe = rpe_on_shared_seeds("prose")
    assert {f"{x:.0f}" for x in alibi} == {"7"} and "`alibi` is 7% above it at every" in text
    assert {f"{x:.0f}" for x in power} == {"-3"} and "`kerple_power` 3% below it" in text
    assert rotary[[128, 256]].abs().max() < 1 and f"{rotary[1024]:.0f}% above it at 1,024" in text
    said = f"On the seeds that both have, `rpe` is {-rpe[128]:.1f}% below it at 128 and"
    assert f"{said} {rpe[8192]:.1f}% above at 8,192" in text
    rotary = 100 * (mean.loc["rotary"] / mean.loc["rotary", 128] - 1)
    assert f"{rotary[512]:.0f}% worse at 512, and {rotary[2048]:.0f}% worse at 2,048" in text
    rpe = measured[measured["embedding"] == "rpe"].pivot_table("value", "seed", "length")
    worse = rpe[8192] > 1.02 * rpe[rpe.mean().idxmin()]
    assert sum(worse) == 2 and "two of three seeds of `rpe`" in text


def test_percentages_on_latex_and_on_all_texts():
    text = one_line(ROOT / "docs" / "lab" / "measurements.md").split("### On LaTeX")[1]
    texts = {folder: means(folder) for _, folder in HAND_SCALE}
    mean = texts["latex"]
    alibi, power = (
        100 * (mean.loc[name] / mean.loc["kerple_log"] - 1) for name in ("alibi", "kerple_power")
    )
    rpe = rpe_on_shared_seeds("latex")
    assert mean.loc["kerple_log"].idxmin() == 1024 and mean.loc["alibi"].is_monotonic_decreasing
    assert f"{alibi[128]:.1f}% above `kerple_log` at 128, and {alibi[8192]:.1f}% at 8,192" in text
    assert f"{-power.max():.1f}% to {-power.min():.1f}% below `kerple_log`" in text
    said = f"On the seeds that both have, `rpe` is {-rpe[128]:.1f}% below it at 128 and"
    assert f"{said} {rpe[8192]:.0f}% above at 8,192" in text
    rotary = 100 * (mean.loc["rotary"] / mean.loc["rotary", 128] - 1)
    assert f"{rotary[512]:.0f}% worse at 512, and {rotary[2048]:.0f}% worse at 2,048" in text
    below = {
        name: 100 * (1 - m.loc["kerple_log", 2048] / m.loc["alibi", 2048])
        for name, m in texts.items()
    }
    assert f"on each, by {min(below.values()):.0f}% to {max(below.values()):.0f}%;" in text
    power = pd.concat(
        [100 * (1 - m.loc["kerple_power"] / m.loc["kerple_log"]) for m in texts.values()]
    )
    assert f"on each, by {power.min():.1f}% to {power.max():.1f}%;" in text
    for mean in texts.values():
        rotary = mean.loc["rotary"] / mean.loc["rotary", 128]
        assert rotary[256] < 1.1 < rotary[1024]


def test_backends_of_the_hand_scale_grid():
    results = pd.read_csv(ROOT / "docs" / "results" / "backends" / "results.csv")
    measured = results[results["metric"] == "loss"]
    loss = measured.pivot_table("value", ["length", "seed"], "backend")
    largest = (loss["blocked"] / loss["eager"] - 1).abs().max()
    text = one_line(ROOT / "docs" / "lab" / "measurements.md")
    assert f"Runs of one seed differ by {scientific(largest)} of the loss" in text


def test_learning_rates_of_the_hand_scale_grid():
    measured = perplexities("lr").set_index(["embedding", "lr"])["value"]
    grid = (ROOT / "configs" / "paper" / "stand_in.yml").read_text()
    table = rows(ROOT / "docs" / "lab" / "measurements.md", "The search of learning rates")
    assert {row["embedding"] for row in table} == set(measured.index.unique("embedding"))
    for row in table:
        embedding = row.pop("embedding")
        for rate, cell in row.items():
            if cell:
                assert_rounded(cell.strip("*"), measured[embedding, float(rate)])
        best = measured[embedding].idxmin()
        (bold,) = (rate for rate, cell in row.items() if cell.startswith("*"))
        assert float(bold) == best
        assert f"{embedding}: {{overrides: {{optimizer.params.lr: {bold}}}" in grid


def test_the_gap_to_alibi_over_the_length():
    page = ROOT / "docs" / "lab" / "measurements.md"
    table = rows(page, r"Does the gap to ALiBi open\?")
    assert [row["text"] for row in table] == ["code", "prose", "LaTeX"]
    for row in table:
        measured = perplexities(row["text"].lower())
        by_seed = measured.pivot_table("value", ["seed", "length"], "embedding")
        gap = np.log(by_seed["kerple_log"] / by_seed["alibi"]).dropna().unstack("length")
        for length in (128, 2048, 8192):
            assert row[f"{length:,}"] == f"{100 * np.expm1(gap[length].mean()):+.1f}%"
        change = gap[8192] - gap[128]
        test = stats.ttest_1samp(change, 0)
        low, high = 100 * np.expm1(test.confidence_interval())
        text = f"{100 * np.expm1(change.mean()):+.2f}% [{low:+.2f}, {high:+.2f}]"
        assert row["change, 128 to 8,192"] == text
        assert row["p"] == f"{test.pvalue:.2g}"
    paper = json.loads((ROOT / "configs" / "paper" / "tables.json").read_text())
    for corpus, said in (
        ("openwebtext2", "OpenWebText2"),
        ("github", "GitHub"),
        ("arxiv", "ArXiv"),
    ):
        of = paper["tables"]["small-512"][corpus]
        start, end = (
            100 * (of["kerple_log"][n][0] / of["alibi"][n][0] - 1) for n in ("512", "8192")
        )
        assert f"from {start:.1f}% to {end:.1f}% on {said}" in one_line(page)


def test_the_gain_of_far_text():
    docs = ROOT / "docs"
    table = rows(docs / "lab" / "measurements.md", r"Does far text help\?")
    twins = [f"results/code/windowed_twin_{name}.csv" for name in ("kerple_log", "alibi")]
    files = ("quickstart/suite/windowed_twin.csv", *twins)
    for row, name in zip(table, files, strict=True):
        found = pd.read_csv(docs / name).iloc[0]
        assert found.bins == "all"
        assert row["gain"] == f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
    loss = pd.read_csv(docs / "quickstart" / "suite" / "by_length.csv").set_index("length")["loss"]
    gain, fall = pd.read_csv(docs / files[0]).iloc[0].value, loss[128] - loss[2048]
    assert f"its loss falls by {fall:.3f} nats" in one_line(docs / "lab" / "measurements.md")
    assert f"explains {gain:.3f}. The" in one_line(docs / "lab" / "measurements.md")
