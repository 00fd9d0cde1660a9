"""Test tools/experiments/moved_theta.py: the start values are those with which training began."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from megatron.files import parse_json
from megatron.parallel.groups import Groups
from tests.helpers.jobs import run_job, write_config, write_shards
from tests.helpers.launch import run_ranks
from tools import table
from tools.experiments import moved_theta

KEYS = {"train_micro_batch_size_per_gpu": 4, "train_iters": 2, "eval_iters": 0}
TERMS = {"pos_emb": "rotary + kerple_log", "theta_init": {"kerple_log.bias_a": 0.3}}
FROZEN = {
    "bf16": {"precision": "bfloat16", **TERMS},
    "shared": {"pos_emb": "fire"},
    "layers": {"theta_per_layer": True, "reset_attention_mask": True},
    "unlike": {"pos_emb": [[["kerple_log", "kerple_power"], 1]]},
}

MOVED = {"pos_emb": "sink + kerple_log", "eval_lengths": [16], "eval_tokens": 64}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a folder with a run for each key of FROZEN, and one that moves theta."""
    folder = tmp_path_factory.mktemp("runs")
    prefix = write_shards(folder)
    run_ranks(1, train, folder, prefix)
    return folder


def train(groups: Groups, folder: Path, prefix: str) -> None:
    for name, keys in {**FROZEN, "moved": MOVED}.items():
        run, config = str(folder / name), folder / f"{name}.yml"
        frozen = {"theta_frozen": name in FROZEN}
        write_config(config, prefix, **KEYS, **frozen, **keys, save=run, load=run)
        run_job(groups, config)


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_theta_has_not_moved(trained, name):
    rows = moved_theta.of_run(trained / name)
    assert rows and {row["change"] for row in rows} == {0.0}
    assert all(row["start"] == row["end"] and row["step"] == 2 for row in rows)
    expected = {
        "bf16": {"kerple_log.bias_p", "kerple_log.bias_a"},
        "shared": {"table", "shared"},
        "layers": {"bias_p", "bias_a"},
        "unlike": {f"{pos}.bias_{x}" for pos in ("kerple_log", "kerple_power") for x in "ap"},
    }
    assert {row["parameter"] for row in rows} == expected[name]
    if name == "bf16":
        assert rows[1]["start"] == torch.tensor(0.3).bfloat16().item()


def test_the_report_shows_what_moved(trained, tmp_path, capsys):
    out = tmp_path / "out"
    assert table.main([str(trained / "moved"), "--out", str(out)]) == 0
    moved = pd.read_csv(out / "theta.csv").set_index("parameter")
    lines = (trained / "moved" / "metrics.jsonl").read_text().splitlines()
    [last] = [
        row for row in map(parse_json, lines) if row["step"] == 2 and "theta/sink.sink" in row
    ]
    end = np.array(last["theta/kerple_log.bias_p"])
    row = moved.loc["kerple_log.bias_p"]
    assert row["end"] == pytest.approx(end.mean()) and row["step"] == 2
    assert 0.001 < row["change"] < 0.02 and row["relative"] > row["change"] / 2
    printed = capsys.readouterr().out
    sink = moved.loc["sink.sink"]  # it starts at 0
    assert sink["start"] == 0 < sink["change"] and np.isnan(sink["relative"])
    assert f"| 0 | {sink['end']:.3g} | {sink['change']:.2g} |  |" in printed
    text = f"| sink + kerple_log | kerple_log.bias_p | 1 | {row['start']:.3g} | {row['end']:.3g} | "
    assert text in printed and "| of the start |" in printed
    assert "What training did" in (out / "report.html").read_text()


def test_runs_whose_start_is_unknown(trained, tmp_path):
    shutil.copy(trained / "moved" / "metrics.jsonl", tmp_path)
    keys = yaml.safe_load((trained / "moved" / "config.yml").read_text())
    (tmp_path / "config.yml").write_text(yaml.safe_dump(keys | {"load": "elsewhere"}))
    assert moved_theta.of_run(tmp_path) == []
    (tmp_path / "config.yml").write_text(yaml.safe_dump(keys | {"num_layer": 1}))
    about = {"cell": "c", "embedding": "e", "seed": 1, "folder": str(tmp_path)}
    results = pd.DataFrame([about | {"length": 16, "metric": "loss", "value": 1.0}])
    found, remarks = moved_theta.of_runs(results)
    assert found.empty and "c: theta's start is unknown: " in remarks[0]
    (tmp_path / "config.yml").write_text(yaml.safe_dump(keys | {"pos_emb": "kerple_power"}))
    found, remarks = moved_theta.of_runs(results)
    assert found.empty and "pos_emb: the run logged sink.sink, kerple_log.bias_p" in remarks[0]
