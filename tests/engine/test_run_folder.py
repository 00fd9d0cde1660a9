"""Test what a run folder says about its files, without the engine."""

import subprocess
import sys

import pytest

from megatron.run_folder import RunFolder


def test_it_imports_no_torch():
    code = "import megatron.run_folder, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_of_metrics_are_whole_lines(tmp_path):
    run = RunFolder(tmp_path)
    assert list(run.metrics_rows()) == []
    good = [b'{"step": 1, "a": 1}', b'{"step": 2, "a": null}', b'{"step": 2, "b": [1, 2]}']
    damaged = [
        b"\0" * 9,
        b'{"step": 3, "\xff": 1}',
        b'{"ste',
        b"[1]",
        b'{"a": 1}',
        b'{"step": "1"}',
    ]
    lines = [damaged[0], good[0], *damaged[1:4], good[1], *damaged[4:], good[2]]
    run.metrics.write_bytes(b"\n".join(lines) + b'\n{"step": 4}')
    rows = [{"step": 1, "a": 1}, {"step": 2, "a": None}, {"step": 2, "b": [1, 2]}]
    assert list(run.metrics_rows()) == rows
    assert list(run.metrics_rows(newest_first=True)) == rows[::-1]


@pytest.mark.parametrize(
    "latest, step", [(None, 0), ("global_step12\n", 12), ("global_step7", 0), ("other", 0)]
)
def test_the_newest_step_is_that_of_an_existing_checkpoint(tmp_path, latest, step):
    for name in ("global_step2", "global_step12", "global_stepX", "other"):
        (tmp_path / name).mkdir()
    run = RunFolder(tmp_path)
    if latest:
        run.latest.write_text(latest)
    assert run.newest_step() == step and run.tags() == ["global_step2", "global_step12"]


def test_results_are_the_tables_of_lengths(tmp_path):
    names = [path.name for path in RunFolder(tmp_path).results]
    assert names == ["extrapolation.csv", "accuracy.csv"]
