"""Test tools/sweep.py and tools/table.py on a real grid: killed, resumed, reported."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml

from megatron.engine.job.lease import sole_writer
from megatron.files import parse_json
from tests.helpers.jobs import BASE, rows, write_shards
from tests.helpers.paths import ROOT
from tools import sweep, table
from tools.experiments import runner
from tools.experiments.grid import read_grid


@pytest.fixture(autouse=True)
def quick_start(monkeypatch, start_forked):
    monkeypatch.setattr(runner, "start", start_forked)


def write_grid(folder: Path, prefix: str, **changes) -> Path:
    base = folder / "base.yml"
    base.write_text(yaml.safe_dump(BASE | {"data_path": prefix}))
    content = {
        "runs": str(folder / "runs"),
        "configs": [str(base)],
        "overrides": {
            "pos_emb": "{embedding}", "train_iters": 30, "log_interval": 1, "eval_iters": 0,
            "save_interval": 5, "eval_tokens": 64, "train_micro_batch_size_per_gpu": 4,
        },
        "axes": {"embedding": ["kerple_log", "rotary"]},
        "seeds": [1, 2],
        "lengths": [16, 32],
        "compare": "kerple_log",
        "endpoints": {
            "P1": {
                "claim": "below",
                "of": {"embedding": "kerple_log", "length": 32},
                "than": {"embedding": "rotary"},
            }
        },
    }  # fmt: skip
    path = folder / "grid.yml"
    path.write_text(yaml.safe_dump(content | changes))
    return path


def index(folder: Path) -> dict[str, str]:
    cells = pd.read_csv(folder / "runs" / "cells.csv")
    return dict(zip(cells["cell"], cells["state"], strict=True))


def interrupt_while_training(metrics: Path) -> threading.Thread:
    """Send SIGTERM to this process when the run with this file has taken a few steps."""

    def watch():
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_a_grid_is_killed_resumed_and_reported(tmp_path, capsys):
    grid, runs = write_grid(tmp_path, write_shards(tmp_path)), tmp_path / "runs"
    assert sweep.main([str(grid), "--list"]) == 0
    assert "rotary-2" in capsys.readouterr().out and not runs.exists()
    watch = interrupt_while_training(runs / "kerple_log-2" / "metrics.jsonl")
    assert sweep.main([str(grid)]) == 130
    watch.join()
    out = capsys.readouterr().out
    assert "kerple_log-1: finished" in out and "kerple_log-2: cut off" in out
    assert set(index(tmp_path).values()) == {"finished", "cut off", "new"}
    reached = max(rows(runs / "kerple_log-2"))
    assert reached < 30

    assert sweep.main([str(grid), "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    assert "1 of 4 cells are done" in out and "kerple_log-1: starts" not in out
    assert "kerple_log-2: resumes" in out and "3 of 3 cells ended" in out
    assert set(index(tmp_path).values()) == {"finished"}
    log = (runs / "kerple_log-2" / "log.txt").read_text()
    assert f"step {reached}" in log and len(rows(runs / "kerple_log-2")) == 30
    cells = pd.read_csv(runs / "cells.csv")
    assert cells["seconds"].gt(0).all()
    assert cells["text_fingerprint"].nunique() == cells["torch"].nunique() == 1

    assert table.main([str(grid), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\| kerple_log \| 2 \| [\d,.]+ ± [\d.]+ \| [\d,.]+ ± [\d.]+ \|", out)
    verdict = r"- (?:holds|not shown|contradicted) \(P1\): perplexity: kerple_log at .*\. .*% int"
    assert len(re.findall(verdict, out)) == out.count("kerple_log at 32") == 1
    html = (tmp_path / "out" / "report.html").read_text()
    pictures = [base64.b64decode(each) for each in re.findall(r"base64,([^\"]+)", html)]
    assert len(pictures) == 2 and all(b"<svg " in each for each in pictures)
    assert 'src="http' not in html and "The kernels of kerple_log" in html
    shown = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))
    assert "4 models with 2 layers of width 32 were trained for 30 steps of " in shown
    assert "with 2 seeds (1 to 2). They are measured on the valid split; a claim " in shown
    places = [shown.index(each) for each in ("Verdicts", "(P1):", "All runs", "How to rebuild")]
    assert places == sorted(places)
    command = f"python tools/table.py {grid} --out {tmp_path / 'out'}"
    assert f"python tools/sweep.py {grid} {command}" in shown
    assert re.search(r"The runs: 20[\d-]+, commit \w+ on \S+: \w+, driver", shown)
    results = pd.read_csv(tmp_path / "out" / "results.csv")
    assert len(results) == 4 * 2 * 3  # cells, lengths, metrics
    changed(grid, runs, capsys)


def changed(grid: Path, runs: Path, capsys) -> None:
    """Change one key: finished runs are stale, and are named, kept or run again."""
    old = grid.read_text()
    grid.write_text(old.replace("- 32", "- 24").replace("length: 32", "length: 24"))
    assert sweep.main([str(grid), "--only", "rotary-2"]) == 0
    assert "rotary-2: resumes" in capsys.readouterr().out and len(rows(runs / "rotary-2")) == 30
    assert pd.read_csv(runs / "rotary-2" / "extrapolation.csv")["length"].to_list() == [16, 24]
    only = ("--only", "rotary-1", "--only", "*y-2")
    assert sweep.main([str(grid), "--list", *only]) == 0
    out = capsys.readouterr().out
    assert "cut off: eval_lengths: [16, 32] -> [16, 24]" in out and "2 cells in" in out
    grid.write_text(old.replace("train_iters: 30", "train_iters: 2"))
    assert sweep.main([str(grid)]) == 1
    out = capsys.readouterr().out
    assert (
        out.count("STALE: ") == out.count("train_iters: 30 -> 2") == 4
        and "give --stale rerun" in out
    )
    assert sweep.main([str(grid), "--stale", "keep"]) == 0
    assert table.main([str(grid), "--out", str(runs.parent / "out")]) == 0
    assert "rotary-1: stale (lr_decay_iters: 30 -> 2" in capsys.readouterr().out
    again = [str(grid), "--only", "rotary-1", "--stale", "rerun"]
    with sole_writer(runs / "rotary-1"):
        assert sweep.main(again) == 1
    assert "left to other jobs: rotary-1" in capsys.readouterr().out
    assert max(rows(runs / "rotary-1")) == 30
    assert sweep.main(again) == 0 and not [*runs.glob("*.stale-1/.lease*")]
    assert index(runs.parent)["rotary-1"] == "finished"
    assert max(rows(runs / "rotary-1")) == 2 and max(rows(runs / "rotary-1.stale-1")) == 30
    record = parse_json((runs / "kerple_log-1" / "cell.json").read_bytes())
    for key, value in (("text", "another"), ("code", {"megatron": "another"})):
        (runs / "kerple_log-1" / "cell.json").write_text(json.dumps(record | {key: value}))
        grid.write_text(old)
        capsys.readouterr()
        assert sweep.main([str(grid), "--list", "--only", "kerple_log-1"]) == 0
        assert "stale: " in capsys.readouterr().out


def test_a_failed_cell_is_named_and_the_others_run(tmp_path, capsys):
    prefix = write_shards(tmp_path)
    too_long = {"eval_lengths": [100_000], "eval_tokens": 100_000}
    task = {"data_path": "builtin:parity", "task_options": {"max_length": 8}, "eval_examples": 20}
    task |= {"tokenizer_type": None, "make_vocab_size_divisible_by": None, "split": None}
    values = {"lost": {"data_path": "nowhere"}, "task": task, "short": too_long}
    axes = {"text": {name: {"overrides": keys} for name, keys in values.items()}}
    overrides = {"train_iters": 2, "train_micro_batch_size_per_gpu": 1, "eval_iters": 0}
    changes = {"axes": axes, "seeds": [1], "overrides": overrides, "endpoints": {}, "compare": ""}
    grid = write_grid(tmp_path, prefix, **changes)
    assert sweep.main([str(grid)]) == 1
    out = capsys.readouterr().out
    assert "lost-1: FAILED: nowhere" in out and "task-1: finished" in out
    assert "short-1: FAILED: exit code 1; the end of" in out and "evaluate shorter lengths" in out
    assert "failed: lost-1, short-1" in out
    assert index(tmp_path) == {"lost-1": "new", "task-1": "finished", "short-1": "failed"}
    assert table.main([str(tmp_path / "runs" / "task-1"), "--out", str(tmp_path / "out")]) == 0
    assert "exact, mean ± standard deviation" in capsys.readouterr().out
    grid.write_text(grid.read_text().replace("base.yml", "gone.yml"))
    assert sweep.main([str(grid), "--only", "task-*"]) == 1
    assert "task-1: STALE: 1 problem in the configuration" in capsys.readouterr().out
    assert sweep.main([str(grid), "--only", "task-*", "--stale", "rerun"]) == 1
    assert "task-1: FAILED" in capsys.readouterr().out and index(tmp_path)["task-1"] == "stale"
    with pytest.raises(SystemExit) as stopped:
        table.main([str(grid), "--metric", "loss", "--out", str(tmp_path / "out")])
    assert stopped.value.code == 1 and "has measured loss; lost-1: new" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, message",
    [
        ({"axis": {}}, "grid.yml:5: axis: unknown key, did you mean axes?"),
        ({"seeds": []}, "seeds: List should have at least 1 item"),
        ({"configs": ["{corpus}.yml"]}, "configs: {corpus} is neither an axis nor under"),
        ({"axes": {"a": ["x/y"]}}, "axes.a: 'x/y' names folders"),
        ({"axes": {"seed": ["a"]}}, "axes.seed: seed is another column of the results"),
        ({"axes": {"a": []}}, "axes.a: has no values"),
        ({"seeds": [1, 1]}, "axes: 2 cells are named kerple_log-1, and each needs a run folder"),
        ({"overrides": {"seed": 3}}, "overrides: each cell has its own seed"),
        ({"overrides": {"a": {"b": ["{c}"]}}}, "configs: {c} is neither an axis nor under"),
        ({"rows": "seed"}, "rows: seed is no axis; known: embedding"),
        ({"compare": "alibi"}, "compare: alibi is no value of embedding"),
        (
            {"endpoints": {"P": {"claim": "below", "of": {"embedding": "alibi"}, "than": {}}}},
            "endpoints.P: embedding: alibi is not in this grid; known: kerple_log, rotary",
        ),
        (
            {"endpoints": {"P": {"claim": "below", "of": {"embedding": "rotary"}, "than": {}}}},
            "endpoints.P: of: names no length; known: 16, 32",
        ),
    ],
)
def test_faults_of_a_grid_file(tmp_path, capsys, change, message):
    grid = write_grid(tmp_path, "unread", **change)
    with pytest.raises(SystemExit) as stopped:
        sweep.main([str(grid), "--list"])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_names_stand_for_values_in_nested_overrides(tmp_path):
    optimizer = {"params": {"lr": "{lr}", "betas": [0.9, "{beta}"]}, "type": "Adam"}
    changed = {"optimizer": optimizer, "train_iters": 3, "train_micro_batch_size_per_gpu": 4}
    changes = {"variables": {"lr": "2e-3", "beta": "0.5"}, "overrides": changed}
    settings = read_grid(write_grid(tmp_path, "unread", **changes)).cells[0].config().optimizer
    assert (settings.lr, settings.betas) == (2e-3, (0.9, 0.5))


def test_each_faulty_cell_is_listed(tmp_path, capsys):
    grid = write_grid(tmp_path, "unread", overrides={"num_layer": 3})
    assert sweep.main([str(grid), "--list"]) == 2
    out = capsys.readouterr().out
    assert out.count("num_layer: unknown key") == 4 and "4 cells in" in out


def test_a_pattern_without_cells_is_refused(tmp_path, capsys):
    for more in ([], ["--list"]):
        with pytest.raises(SystemExit) as stopped:
            sweep.main([str(write_grid(tmp_path, "unread")), "--only", "alibi-*", *more])
        assert stopped.value.code == 2 and "no cell matches" in capsys.readouterr().err


def test_the_run_of_another_sweep_is_left_as_it_is(tmp_path, capsys):
    grid, cell = write_grid(tmp_path, write_shards(tmp_path)), tmp_path / "runs" / "rotary-1"
    with sole_writer(cell):
        record, results = cell / "cell.json", cell / "extrapolation.csv"
        for path in (record, results):
            path.write_text("of the other sweep")
        assert sweep.main([str(grid), "--only", "rotary-1"]) == 1
        assert re.search("rotary-1: left to .*: save: .* is in use by", capsys.readouterr().out)
        assert record.read_text() == results.read_text() == "of the other sweep"


@pytest.mark.parametrize("record", ["{", "[]", '{"another": "file"}'])
def test_a_run_with_a_damaged_record_is_stale(record, tmp_path, capsys):
    grid, cell = write_grid(tmp_path, write_shards(tmp_path)), tmp_path / "runs" / "rotary-1"
    cell.mkdir(parents=True)
    (cell / "latest").write_text("global_step30")
    (cell / "cell.json").write_text(record)
    assert sweep.main([str(grid), "--only", "rotary-1"]) == 1
    assert "or its cell.json is damaged" in capsys.readouterr().out
    assert (cell / "cell.json").read_text() == record


def test_slurm_runs_the_cells_that_are_left(tmp_path, capsys):
    grid = write_grid(tmp_path, "unread", variables={"lr": "1e-3"})
    given = ["--set", "lr=a=b", "--only", "rotary-*"]
    assert sweep.main([str(grid), "--slurm", "--jobs", "3", *given]) == 0
    shown = "sbatch --array=2,3%3 --gpus-per-node=1 tools/slurm/sweep.sbatch "
    assert capsys.readouterr().out == f"{shown}{grid} --set lr=a=b\n"
    assert (ROOT / "tools" / "slurm" / "sweep.sbatch").exists()


def test_a_grid_of_length_tasks_has_a_table_of_accuracies(tmp_path, capsys):
    overrides = {
        "tokenizer_type": None, "task_options": {"max_length": 4}, "train_iters": 2,
        "eval_iters": 0, "eval_examples": 20, "train_micro_batch_size_per_gpu": 4,
    }  # fmt: skip
    changes = {"overrides": overrides, "axes": {"embedding": ["kerple_log"]}, "seeds": [1]}
    changes |= {"lengths": [4, 8], "endpoints": {}}
    grid = write_grid(tmp_path, "builtin:copy", **changes)
    assert sweep.main([str(grid)]) == 0
    capsys.readouterr()
    assert sweep.main([str(grid), "--list"]) == 0
    assert re.search(r"kerple_log-1 +finished", capsys.readouterr().out)
    out = tmp_path / "out"
    assert table.main([str(grid), "--metric", "exact", "--out", str(out)]) == 0
    assert "exact, mean" in capsys.readouterr().out
    measured = pd.read_csv(tmp_path / "runs" / "kerple_log-1" / "accuracy.csv")
    results = pd.read_csv(out / "results.csv")
    for metric in ("exact", "token"):
        shown = results[results["metric"] == metric]
        assert shown["length"].tolist() == [4, 8]
        assert shown["value"].tolist() == measured[metric].tolist()
