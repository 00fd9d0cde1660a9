"""Test that README and the short page of results say what the tables of the lab say."""

from __future__ import annotations

import re

import pandas as pd

from megatron.positional import names
from tests.helpers.paths import ROOT
from tests.pages.figures.held import (
    assert_rounded,
    largest_errors,
    matrix_log,
    means,
    one_line,
    perplexities,
    rows,
    says,
)


def test_readme_says_what_its_picture_shows():
    text = one_line(ROOT / "README.md")
    mean = means("code")
    assert "![perplexity by length of six embeddings](docs/results/code/by_length.png)" in text
    assert len(mean) == 6 and list(mean.columns[[0, -1]]) == [128, 8192]
    rotary, log, alibi = (
        [f"{mean.loc[name, length]:.1f}" for length in (128, 8192)]
        for name in ("rotary", "kerple_log", "alibi")
    )
    assert f"the perplexity of `rotary` rises from {rotary[0]} to {rotary[1]}." in text
    assert f"The perplexity of `kerple_log` falls from {log[0]} to {log[1]}, and" in text
    assert f"perplexity of `alibi` from {alibi[0]} to {alibi[1]}." in text
    assert f"`{mean[8192].idxmin()}` is lowest: {mean[8192].min():.1f} at 8,192." in text
    twin = pd.read_csv(ROOT / "docs/results/code/windowed_twin_kerple_log.csv").iloc[0]
    assert (
        twin.bins == "all"
        and f"a `kerple_log` model even falls, by {-twin.value:.3f} nats (one" in text
    )
    doses = pd.read_csv(ROOT / "docs/results/recipe_dose/verdicts.csv", index_col="dose")
    longest = doses[doses.embedding == "kerple_log"].loc[5600]
    assert longest.R1 and longest.seeds == 3
    said = f"{longest.gain:.3f} nats (three seeds), which is {longest.share:.0%} of what copying"
    assert f"At 2,048 tokens, it lowers their loss by {said}" in text
    results = one_line(ROOT / "docs" / "results.md")
    assert f"At 2,048 tokens, the gain is +{said}" in results


def test_the_short_results_are_those_of_the_lab():
    page, lab = ROOT / "docs" / "results.md", ROOT / "docs" / "lab" / "measurements.md"
    table = rows(page, "Perplexity by length")
    for row in table:
        found = perplexities("code")
        found = found[found["embedding"] == row.pop("embedding")]
        for length, cell in row.items():
            values = found.loc[found["length"] == int(length.replace(",", "")), "value"]
            mean, deviation = cell.split(" ± ")
            assert_rounded(mean, values.mean())
            assert_rounded(deviation, values.std())
    gap = rows(lab, r"Does the gap to ALiBi open\?")
    assert rows(page, "KERPLE and ALiBi") == gap
    far = r"Does far text help\?"
    assert rows(page, far) == rows(lab, far)
    attention, data, step = (row["result"] for row in rows(page, "Speed"))
    assert attention in one_line(lab).replace("relative to", "")
    assert f"two workers are {data.partition(' times')[0]} times as fast" in one_line(lab)
    gigatoken = re.search(r"([\d.]+ times) with `--backend gigatoken", data)
    assert gigatoken and f"`--backend gigatoken` {gigatoken[1]}" in one_line(lab)
    goals = (ROOT / "docs" / "lab" / "performance.md").read_text()
    assert f"| {step.partition(' times')[0]} (" in goals
    below = sorted(float(row["2,048"].strip("%-")) for row in gap)
    said = f"[{below[0]:.0f}% to {below[-1]:.0f}% below ALiBi]"
    assert said in (ROOT / "README.md").read_text()


def test_the_other_figures_of_readme():
    text = one_line(ROOT / "README.md")
    assert f"[{len(names())} embeddings, and sums of them]" in text
    first = pd.read_csv(ROOT / "docs/quickstart/extrapolation_kerple_log.csv")
    short, *_, long, longest = [f"{value:.1f}" for value in first.perplexity]
    assert f"the perplexity: {short} at 128 tokens, and {long} at 1,024 and 2,048." in text
    assert long == longest and [*first.length[[0, 3, 4]]] == [128, 1024, 2048]
    cells = [each for each in matrix_log()[0] if not each.several]
    said = largest_errors(cells)
    says("../README", f"- {len(cells)} combinations of a model and a parallel layout", f"to {said}")
    says("layouts", said)
    attention, data, _ = (row["result"] for row in rows(ROOT / "docs" / "results.md", "Speed"))
    assert f"[{attention.split()[0]} of the time]" in text
    assert f"[{float(data.split()[0]):.0f} times as fast]" in text
    others = pd.read_csv(ROOT / "docs" / "lab" / "published_runs.csv").set_index("run")
    assert f"[20B parameters on {others.gpus['GPT-NeoX-20B']} GPUs]" in text
    title = (ROOT / "docs" / "your_model.md").read_text().partition("\n")[0].removeprefix("# ")
    (licence,) = re.findall(r"^ +Version ([\d.]+),", (ROOT / "LICENSE").read_text(), re.M)
    assert f"[{title}](docs/your_model.md)" in text and f"Apache License {licence}," in text
    says("../CONTRIBUTING", f"under the [Apache License {licence}](LICENSE), section 5.")


def test_the_summary_of_the_length_tasks():
    found = pd.read_csv(ROOT / "docs" / "length_tasks" / "crosses.csv")
    exact = found[found["metric"] == "exact"].pivot_table(
        "value", ["task", "length", "embedding"], "seed"
    )
    text = one_line(ROOT / "docs" / "length_tasks.md")
    sort = 100 * exact.loc["sort", 20][1235]
    assert f"is right on {sort['none']:.1f}% of the rows of twice the training length" in text
    assert f"every other model on at most {sort.drop('none').max():.1f}%" in text
    for task, length in (("reverse", 20), ("modular", 20), ("addition", 10)):
        assert exact.loc[task, length][1235].max() == 0
    learnt = (exact.loc["mqar", 4] >= 0.9).sum(axis=1)
    assert set(learnt.index[learnt == 3]) == {"kerple_log", "log_n+kerple_log"}
    assert set(learnt.index[learnt == 0]) == {"none", "fire", "rotary"}
