"""Test the page that compares planned with published step times."""

from __future__ import annotations

import pandas as pd
import pytest

from benchmarks.plan.plan_time import TABLES, columns_of, config_of, measured, planned, runs
from megatron.engine.model_shape import shape_of
from tests.pages.figures.held import LAB, rows

RUNS = {row["run"]: row for row in runs()}
SMALL = ["llm-foundry 760m H100 16 2048", "llm-foundry 125m A100-40 8 2048", "torchtitan 8B 8"]


def test_every_second_run_by_name_is_held_out():
    names = list(RUNS)
    assert names == sorted(names)
    splits = [row["split"] for row in RUNS.values()]
    assert splits == [("calibration", "held-out")[n % 2] for n in range(len(names))]


@pytest.mark.parametrize("run", RUNS)
def test_each_run_is_a_config_with_its_layout(run):
    """The shape and the layout fit together, and every figure has an address."""
    row = RUNS[run]
    config = config_of(row)
    p, shape = config.parallel, shape_of(config, int(row["vocab"]))
    assert p.data_parallel_size == int(row["dp"])
    assert shape.vocab_size == int(row["vocab"]) and shape.block.mlp_size == int(row["mlp"])
    assert row["source"].startswith("https://")


@pytest.mark.parametrize("run", SMALL)
def test_the_table_has_what_is_planned_today(run):
    row = RUNS[run]
    table = pd.read_csv(TABLES / "planned_runs.csv", dtype=str).set_index("run", drop=False)
    assert table.loc[run].to_dict() == columns_of(row, planned(row))


def test_published_values_in_seconds():
    """By hand: 624 x 2,048 tokens at 1,090,678 a second; GPU hours; operations."""
    assert measured(RUNS[SMALL[1]]) == pytest.approx(624 * 2048 / 1090678)
    assert measured(RUNS["Pythia 6.9B"]) == pytest.approx(33500 * 3600 / 128 / 143000)
    assert measured(RUNS["torchtitan 8B 8"]) == pytest.approx(16 * 8192 / 8 / 6667)
    # The time of 300 billion tokens in days, as the same table has it
    days = measured(RUNS["Megatron 175B ZeRO-3 384"]) * 300e9 / (1536 * 2048) / 86400
    assert days == pytest.approx(90, rel=0.01)


def test_the_summary_is_that_of_the_table(repo_root):
    """Median and largest error of each half, the runs within the interval, and the other page."""
    table = rows(LAB / "published_runs.md", "The runs", "| run ")
    assert [row["run"] for row in table] == list(RUNS)
    for found in rows(LAB / "published_runs.md", "The runs", "| rows "):
        own = [row for row in table if row["rows"] == found["rows"]]
        errors = sorted(abs(float(row["error"].strip("%"))) for row in own)
        middle = (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2
        assert int(found["runs"]) == len(own)
        assert float(found["median error"].strip("%")) == pytest.approx(middle, abs=0.6)
        assert float(found["largest error"].strip("%")) == pytest.approx(errors[-1], abs=0.6)
        ends = [(row, *map(float, row["interval"].split(" to "))) for row in own]
        inside = sum(low < float(row["published s"]) < high for row, low, high in ends)
        # Three digits do not show on which side of an end such a run is.
        ties = [row["run"] for row, *both in ends if float(row["published s"]) in both]
        assert ties in ([], ["GPT-NeoX-20B"])
        assert inside <= int(found["within the interval"]) <= inside + len(ties)
        if found["rows"] == "held-out":
            text = f"median error {found['median error']}, largest {found['largest error']}"
            assert text in (repo_root / "docs" / "memory_and_speed.md").read_text()
