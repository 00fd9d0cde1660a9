"""Test that the numbers on the pages are those of the committed CSV files."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest


def rows(page: Path, heading: str) -> list[dict[str, str]]:
    """Return the rows of the first table under a heading of a page, by the table's column names."""
    section = re.split(r"\n#+ ", re.split(f"#+ {heading}\n", page.read_text())[1])[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    names, _, *cells = ([cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines)
    return [dict(zip(names, each, strict=True)) for each in cells]


def assert_rounded(text: str, value: float) -> None:
    decimals = len(text.partition(".")[2])
    assert text == f"{value:,.{decimals}f}"


def test_perplexities_of_the_quickstart(repo_root):
    table = rows(repo_root / "docs" / "results.md", "Perplexity by length")
    embeddings = list(table[0])[2:]
    assert len(table) == 5 and len(embeddings) >= 6
    for embedding in embeddings:
        name = re.sub(r"\W+", "_", embedding)
        results = pd.read_csv(repo_root / "docs" / "quickstart" / f"extrapolation_{name}.csv")
        measured = results.set_index("length")
        for row in table:
            found = measured.loc[int(row["length"].replace(",", ""))]
            perplexity, error = row[embedding].split(" ± ")
            assert_rounded(perplexity, found.perplexity)
            assert_rounded(error, found.perplexity * found.stderr)


def test_perplexities_of_the_hand_scale_grid(repo_root):
    table = rows(repo_root / "docs" / "results.md", "The paper's comparison at hand-scale")
    results = pd.read_csv(repo_root / "docs" / "results" / "code" / "results.csv")
    measured = results[results["metric"] == "perplexity"]
    lengths = [name for name in table[0] if name.replace(",", "").isdigit()]
    assert {row["embedding"] for row in table} == set(measured["embedding"])
    assert len(lengths) == measured["length"].nunique()
    for row in table:
        runs = measured[measured["embedding"] == row["embedding"]]
        assert int(row["seeds"]) == runs["seed"].nunique()
        for length in lengths:
            values = runs.loc[runs["length"] == int(length.replace(",", "")), "value"]
            mean, deviation = row[length].split(" ± ")
            assert_rounded(mean, values.mean())
            assert_rounded(deviation, values.std())


@pytest.mark.parametrize(
    ("heading", "folder"),
    [("The paper's comparison at hand-scale", "code"), ("Are two backends equal?", "backends")],
)
def test_verdicts_of_the_hand_scale_grids(heading, folder, repo_root):
    text = (repo_root / "docs" / "results.md").read_text().split(f"## {heading}\n")[1]
    items = re.split(r"\n## ", text)[0].replace("\n  ", " ").splitlines()
    verdicts = pd.read_csv(repo_root / "docs" / "results" / folder / "verdicts.csv")
    assert len(verdicts)
    for each in verdicts.itertuples():
        start = f"- {each.name}: **{each.word}**"
        numbers = f"({each.change:+.2f}%", f"{each.low:+.2f} to {each.high:+.2f}"
        found = [item for item in items if all(number in item for number in numbers)]
        found = [item for item in found if item.startswith(start)]
        assert found, each
        for p in re.findall(r"p = ([\d.e-]+)", found[0]):
            assert float(p) in (float(f"{each.p:.2g}"), float(f"{each.holm:.2g}"))


def test_percentages_of_the_hand_scale_grid(repo_root):
    text = (repo_root / "docs" / "results.md").read_text().replace("\n", " ")
    folder = repo_root / "docs" / "results" / "code"
    results = pd.read_csv(folder / "results.csv")
    mean = results[results["metric"] == "perplexity"].pivot_table("value", "embedding", "length")
    power = 100 * (1 - mean.loc["kerple_power"] / mean.loc["kerple_log"])
    assert f"{power.min():.1f}% to {power.max():.1f}% below `kerple_log`" in text
    rotary = 100 * (mean.loc["rotary"] / mean.loc["rotary", 128] - 1)
    assert f"{rotary[512]:.0f}% worse at 512, and {rotary[2048]:.0f}% worse at 2,048" in text
    alibi = 100 * (mean.loc["alibi"] / mean.loc["kerple_log"] - 1)
    assert f"{alibi[128]:.0f}% above `kerple_log` at 128 and {alibi[8192]:.0f}% at 8,192" in text
    theta = pd.read_csv(folder / "theta.csv")
    moved = 100 * theta.groupby(["embedding", "parameter"])["relative"].mean()
    log, power = moved["kerple_log"], moved["kerple_power"]
    assert f"`kerple_log` by {log['bias_p']:.0f}% of its start value" in text
    assert f"`bias_a` by {log['bias_a']:.0f}%" in text
    assert f"by {power['bias_p']:.0f}% and {power['bias_a']:.0f}%" in text
    assert f"the table of `rpe` by {moved['rpe', 'table']:.0f}%" in text


def test_learning_rates_of_the_hand_scale_grid(repo_root):
    results = pd.read_csv(repo_root / "docs" / "results" / "lr" / "results.csv")
    measured = results[results["metric"] == "perplexity"].set_index(["embedding", "lr"])["value"]
    grid = (repo_root / "configs" / "paper" / "stand_in.yml").read_text()
    table = rows(repo_root / "docs" / "results.md", "The search of learning rates")
    assert {row["embedding"] for row in table} == set(results["embedding"])
    for row in table:
        embedding = row.pop("embedding")
        for rate, cell in row.items():
            if cell:
                assert_rounded(cell.strip("*"), measured[embedding, float(rate)])
        best = measured[embedding].idxmin()
        (bold,) = (rate for rate, cell in row.items() if cell.startswith("*"))
        assert float(bold) == best
        assert f"{embedding}: {{overrides: {{optimizer.params.lr: {bold}}}" in grid


def test_shares_of_rounding(repo_root):
    table = rows(repo_root / "docs" / "results.md", r"How much of the long rows is rounding\?")
    names = ("fp32", "bf16", "bf16_published")
    files = (repo_root / "docs" / "results" / "rounding" / f"{name}.csv" for name in names)
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
