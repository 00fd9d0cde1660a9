"""Test the figures of the paper: perplexity by position, and effective lengths by hand."""

from __future__ import annotations

import importlib.util

import pandas as pd
import pytest
import torch

from tests.helpers.jobs import train_run, write_shards
from tests.helpers.launch import run_ranks
from tests.helpers.paths import ROOT

KEYS = {"train_batch_size": 4, "train_iters": 3, "eval_iters": 0, "split": "60,20,20"}
NAMES = ("kerple_log", "alibi", "rotary")


@pytest.fixture(scope="module")
def figures():
    """Return the script as a module; docs/lab is no package."""
    path = ROOT / "docs" / "lab" / "paper_figures.py"
    spec = importlib.util.spec_from_file_location("paper_figures", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(groups, folder, prefix):
    for name in NAMES:
        train_run(groups, folder / name, prefix, KEYS | {"pos_emb": name})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(1, train, folder, write_shards(folder))
    return [str(folder / name) for name in NAMES]


def test_a_twin_is_equal_within_its_window_only(figures, runs, tmp_path, capsys):
    given = ["positions", *runs[:2], "--length", "256", "--window", "64", "--sequences", "2"]
    assert figures.main([*given, "--out", str(tmp_path)]) == 0
    assert "written to" in capsys.readouterr().out and (tmp_path / "positions.svg").exists()
    table = pd.read_csv(tmp_path / "positions.csv")
    assert table.groupby("model", sort=False).size().to_dict() == {
        "kerple_log": 4, "kerple_log, windowed at 64": 4, "alibi": 4
    }  # fmt: skip
    assert set(table.sequences) == {2} and sorted(set(table.first_position)) == [0, 64, 128, 192]
    model, twin, _ = (rows.perplexity.tolist() for _, rows in table.groupby("model", sort=False))
    assert twin[0] == pytest.approx(model[0], rel=1e-6)
    assert all(abs(a / b - 1) > 1e-6 for a, b in zip(model[1:], twin[1:], strict=True))


def test_a_bin_is_the_mean_perplexity_of_its_positions(figures):
    """exp(1) at 64 positions, then exp(2) and exp(4)."""
    losses = torch.cat([torch.ones(64), torch.tensor([2.0, 4.0])]).double().numpy()
    first, second = figures.in_bins(losses, "run", "name", 5)
    assert first["perplexity"] == pytest.approx(2.718281828)
    assert second["perplexity"] == pytest.approx((7.3890561 + 54.5981500) / 2)
    assert (second["first_position"], second["sequences"]) == (64, 5)


def test_the_effective_lengths_of_alibi_by_hand(figures, runs, tmp_path):
    """Slopes 1/4, 1/16, 1/64, 1/256: the first distances with a bias below -2."""
    assert figures.main(["effective", *runs[:2], "--out", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "effective.csv")
    alibi = table[table.model == "alibi"]
    assert list(zip(alibi.distance, alibi.heads, strict=True)) == [
        (0, 0), (9, 1), (33, 2), (129, 3), (513, 4), (20480, 4)
    ]  # fmt: skip
    assert set(table.of) == {4} and set(table.kernel) == {0}


def test_an_embedding_without_a_bias_is_named(figures, runs, tmp_path):
    with pytest.raises(SystemExit, match="rotary has no bias that falls"):
        figures.main(["effective", runs[2], "--out", str(tmp_path)])
