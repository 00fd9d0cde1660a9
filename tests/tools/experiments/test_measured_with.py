"""Result files record what was measured. A grid takes only results of its own settings."""

from __future__ import annotations

import math
import os
import shutil
import signal

import pandas as pd
import pytest

from megatron.config import load_config
from megatron.evaluation.by_length import evaluate_checkpoint
from megatron.run_folder import MOST_BYTES
from megatron.version import fingerprint
from tests.helpers.jobs import write_shards
from tests.tools.experiments.test_experiment_statistics import grid as grid_of
from tests.tools.experiments.test_experiment_statistics import results
from tests.tools.experiments.test_sweep import write_grid
from tools import sweep, table
from tools.experiments import runner
from tools.experiments.claims import p_value, verdicts
from tools.experiments.grid import read_grid
from tools.experiments.results import of_grid
from tools.experiments.state import Record, state_of

MEASURED = ["distance_scale", "split", "step", "code"]
SIZES = ["eval_tokens", "eval_sequences"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a folder with a grid of one finished cell."""
    folder = tmp_path_factory.mktemp("grid")
    changes = {"axes": {"embedding": ["kerple_log"]}, "seeds": [1], "endpoints": {}, "compare": ""}
    grid = write_grid(folder, write_shards(folder), **changes)
    handlers = {number: signal.getsignal(number) for number in runner.SIGNALS}
    assert sweep.main([str(grid)]) == 0
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return grid


@pytest.fixture
def grid(finished):
    """Return the grid, with the cell as the sweep left it."""
    run, kept = finished.parent / "runs" / "kerple_log-1", finished.parent / "kept"
    if not kept.exists():
        shutil.copytree(run, kept)
    shutil.rmtree(run)
    shutil.copytree(kept, run)
    return finished


def evaluate(grid, *overrides, lengths=(16, 32)):
    """Evaluate the cell by hand, as `evaluate.py --load RUN` does."""
    run = grid.parent / "runs" / "kerple_log-1"
    overrides = [*overrides, f"eval_lengths={[*lengths]}"]
    evaluate_checkpoint(load_config([run / "config.yml"], overrides), run)
    return run


def test_the_files_say_what_they_measured(grid):
    run = grid.parent / "runs" / "kerple_log-1"
    stamp = pd.read_csv(run / "extrapolation.csv")[MEASURED].drop_duplicates()
    assert stamp.to_dict("records") == [
        {"distance_scale": 1.0, "split": "valid", "step": 30, "code": fingerprint()}
    ]
    evaluate(grid, "eval_distance_scale=0.5", "eval_split=test", "eval_context_baseline=16")
    for name in ("extrapolation.csv", "context_baseline.csv"):
        stamp = pd.read_csv(run / name)[MEASURED].drop_duplicates()
        assert stamp.to_dict("records") == [
            {"distance_scale": 0.5, "split": "test", "step": 30, "code": fingerprint()}
        ]


@pytest.mark.parametrize(
    "overrides, lengths, why",
    [
        (["eval_distance_scale=0.5"], (16, 32), "distance_scale 0.5 instead of 1.0"),
        (["eval_split=test"], (16, 32), "split test instead of valid"),
        ([], (16, 24), r"lengths other than \[16, 32\]"),
        (["eval_tokens=32"], (16, 32), "eval_tokens 32 instead of 64"),
        (["eval_sequences=1"], (16, 32), "eval_sequences 1 instead of 0"),
    ],
)
def test_another_evaluation_by_hand_is_not_the_grids(grid, overrides, lengths, why, capsys):
    run = evaluate(grid, *overrides, lengths=lengths)
    (cell,) = read_grid(grid).cells
    state, text = state_of(cell)
    assert state == "cut off" and pd.Series(text).str.contains(f"extrapolation.csv .*{why}").all()
    with pytest.raises(SystemExit) as stopped:
        table.main([str(grid), "--out", str(grid.parent / "out")])
    said = capsys.readouterr().err
    assert stopped.value.code == 1 and "kerple_log-1: cut off: " in said and "not counted" in said
    record = Record.read(run)
    record.code = {"megatron": "another"}  # a stale cell is counted, but not with these numbers
    record.write(run)
    with pytest.raises(SystemExit):
        table.main([str(grid), "--out", str(grid.parent / "out")])
    said = capsys.readouterr().err
    assert "kerple_log-1: stale (code" in said and "was measured with" in said


def test_the_sweep_measures_the_grids_lengths_again(grid, monkeypatch, start_forked, capsys):
    monkeypatch.setattr(runner, "start", start_forked)
    run = evaluate(grid, "eval_distance_scale=0.5")
    assert sweep.main([str(grid)]) == 0
    assert "kerple_log-1: resumes" in capsys.readouterr().out
    assert pd.read_csv(run / "extrapolation.csv")["distance_scale"].unique() == [1.0]


def test_the_same_evaluation_by_hand_counts(grid, capsys):
    evaluate(grid)
    assert state_of(read_grid(grid).cells[0]) == ("finished", "")
    assert table.main([str(grid), "--out", str(grid.parent / "out")]) == 0


def test_a_run_that_ended_after_its_sweep_counts(grid):
    """The sweep may stop before it records the end, for example because the disk is full."""
    run = grid.parent / "runs" / "kerple_log-1"
    record = Record.read(run)
    record.state = "running"
    record.write(run)
    assert state_of(read_grid(grid).cells[0]) == ("finished", "")
    found, remarks = of_grid(read_grid(grid))
    assert set(found["length"].dropna()) >= {16, 32} and remarks == []
    (run / "extrapolation.csv").unlink()
    found, remarks = of_grid(read_grid(grid))
    assert found.empty and remarks == ["kerple_log-1: running, not counted"]


def test_a_table_of_somebody_else_does_not_replace_the_results(grid):
    run = grid.parent / "runs" / "kerple_log-1"
    (run / "aaa.csv").write_text("length,perplexity\n16,1.5\n32,1.5\n")
    assert table.main([str(grid), "--out", str(grid.parent / "out")]) == 0
    found = pd.read_csv(grid.parent / "out" / "results.csv")
    assert 1.5 not in found["value"].to_list()


def test_curves_of_another_suite_are_left_out(grid):
    run, out = grid.parent / "runs" / "kerple_log-1", grid.parent / "out"
    (run / "suite").mkdir()
    for split, metrics in (("valid", 4), ("test", 3)):
        text = f"context,value,split\n1,5,{split}\n2,4,{split}\n"
        (run / "suite" / "by_position.csv").write_text(text)
        assert table.main([str(grid), "--out", str(out)]) == 0
        assert pd.read_csv(out / "results.csv")["metric"].nunique() == metrics


def test_a_table_of_an_earlier_version_counts(grid):
    path = grid.parent / "runs" / "kerple_log-1" / "extrapolation.csv"
    pd.read_csv(path).drop(columns=[*MEASURED, *SIZES]).to_csv(path, index=False)
    assert state_of(read_grid(grid).cells[0])[0] == "finished"


def test_a_changed_text_is_stale_although_only_the_evaluation_has_changed(grid):
    """docs/experiments.md: no run continues with another text than it began with."""
    run, old = grid.parent / "runs" / "kerple_log-1", grid.read_text()
    record = Record.read(run)
    record.text = "another"
    record.write(run)
    changed = grid.with_name("changed.yml")
    changed.write_text(old.replace("- 32", "- 24"))
    state, why = state_of(read_grid(changed).cells[0])
    assert state == "stale" and "eval_lengths" in why and "the text has another fingerprint" in why


@pytest.mark.parametrize("percent, word", [(4.9, "not shown"), (5.1, "holds")])
def test_more_than_5_percent_below_means_percent_below(percent, word):
    log, alibi = {"embedding": "log", "length": 128}, {"embedding": "alibi"}
    shift, noise = math.log1p(-percent / 100), [0.0, 1e-5, -1e-5]
    runs = results(log={128: [2 + shift + e for e in noise]}, alibi={128: [2.0, 2.0, 2.0]})
    claim = {"claim": "below", "of": log, "than": alibi, "by": 5}
    (found,) = verdicts(grid_of(P=claim), runs)
    assert found.change == pytest.approx(-percent, abs=1e-3)
    assert (found.word == "holds") == (word == "holds")


def test_above_within_and_equal_keep_their_margins():
    log, alibi = {"embedding": "log", "length": 128}, {"embedding": "alibi"}
    runs = results(log={128: [2.01, 2.03, 2.02]}, alibi={128: [2.0, 2.0, 2.0]})
    for claim in ("above", "within", "equal"):
        (found,) = verdicts(grid_of(P={"claim": claim, "of": log, "than": alibi, "by": 3}), runs)
        a, b = pd.Series([2.01, 2.03, 2.02]), pd.Series([2.0, 2.0, 2.0])
        expected = p_value(a.to_numpy(), b.to_numpy(), claim, math.log1p(0.03))
        assert found.p == pytest.approx(expected, rel=1e-6)


def test_nothing_is_a_hundred_percent_below(tmp_path, capsys):
    claim = {"claim": "below", "of": {"embedding": "kerple_log", "length": 32}, "by": 100}
    endpoints = {"P": claim | {"than": {"embedding": "rotary"}}}
    with pytest.raises(SystemExit):
        sweep.main([str(write_grid(tmp_path, "unread", endpoints=endpoints)), "--list"])
    assert "endpoints.P: by: nothing is 100% below" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ({"length": 8}, "P: length: 8 is not in this grid; known: 16, 32"),
        ({"size": 8}, "P: size: no axis; known: embedding, length"),
        ({"length": 32}, "P: relative_to: is `of` itself"),
    ],
)
def test_faults_of_a_reference(tmp_path, capsys, start, text):
    claim = {"claim": "below", "of": {"embedding": "kerple_log", "length": 32}}
    endpoints = {"P": claim | {"than": {"embedding": "rotary"}, "relative_to": start}}
    with pytest.raises(SystemExit):
        sweep.main([str(write_grid(tmp_path, "unread", endpoints=endpoints)), "--list"])
    assert text in capsys.readouterr().err


def test_a_claim_compares_two_sides(tmp_path, capsys):
    """One mistyped side would make any two values equal."""
    claim = {"claim": "equal", "of": {"embedding": "kerple_log", "length": 32}, "by": 1}
    for given, text in (
        (claim | {"than": {"embedding": "kerple_log"}}, "P: than: is the same as `of`"),
        ([claim | {"than": {}}], "P: than: is the same as `of`"),
        ([], "at least 1 item"),
    ):
        with pytest.raises(SystemExit):
            grid = write_grid(tmp_path, "unread", endpoints={"P": given})
            sweep.main([str(grid), "--list"])
        assert text in capsys.readouterr().err


def test_a_table_says_which_curves_it_leaves_out(grid):
    suite = grid.parent / "runs" / "kerple_log-1" / "suite"
    suite.mkdir()
    (suite / "by_position.csv").write_text("context,value,split,step\n1,2.0,valid,30\n")
    (suite / "receptive_field.csv").write_text("context,value,split,step\n1,2.0,test,30\n")
    assert table.main([str(grid), "--out", str(grid.parent / "out")]) == 0
    said = (grid.parent / "out" / "tables.md").read_text()
    assert "receptive_field.csv was measured with split test instead of valid, not counted" in said
    assert "by_position.csv" not in said
    found = pd.read_csv(grid.parent / "out" / "results.csv")["metric"].to_list()
    assert "loss by position" in found and "loss by context" not in found


def test_curves_of_a_suite_on_other_amounts_of_text_are_left_out(grid):
    run, out = grid.parent / "runs" / "kerple_log-1", grid.parent / "out"
    (run / "suite").mkdir()
    for tokens, metrics in ((65536, 4), (4096, 3)):
        lines = f"context,value,eval_suite_tokens\n1,5,{tokens}\n2,4,{tokens}\n"
        (run / "suite" / "by_position.csv").write_text(lines)
        assert table.main([str(grid), "--out", str(out)]) == 0
        assert pd.read_csv(out / "results.csv")["metric"].nunique() == metrics


def test_metrics_too_large_to_read_do_not_end_a_sweep(grid, monkeypatch, start_forked, capsys):
    """Only the estimate of the time left reads them."""
    monkeypatch.setattr(runner, "start", start_forked)
    run = evaluate(grid, "eval_split=test")
    os.truncate(run / "metrics.jsonl", MOST_BYTES + 1)
    sweep.main([str(grid)])
    assert "kerple_log-1: starts" in capsys.readouterr().out
