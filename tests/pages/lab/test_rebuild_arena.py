"""Test the command that makes the arena again."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

RESULTS = ("arena", "arena_prose", "arena_latex")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "lab")
    return importlib.import_module("rebuild_arena")


def test_the_ten_runs_of_a_text_are_those_of_the_plan(script, capsys):
    assert script.main(["--only", "latex", "--jobs", "3", "--list"]) == 0
    *trained, measured = capsys.readouterr().out.splitlines()
    given = "--set data=data/latex_text_document --set vocab=data/stand_in/latex.json"
    assert all(given in line and line.startswith("$ python tools/sweep.py") for line in trained)
    methods = [line.split("--only ")[1] for line in trained]
    with (ROOT / "docs" / "results" / "arena_latex" / "runs.csv").open() as file:
        rows = [line.split(",")[:2] for line in file.read().splitlines()[1:]]
    assert sorted(methods) == sorted(f"{method}-{seed}" for method, seed in rows)
    assert measured.endswith("--out docs/results/arena_latex --jobs 3")


def test_a_text_that_is_not_prepared_is_named(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "ROOT", tmp_path)
    assert script.main(["--only", "prose"]) == 1
    assert f"{tmp_path}/data/prose_text_document.idx is missing" in capsys.readouterr().out


def test_a_command_that_fails_ends_the_rebuilding(script, monkeypatch, capsys):
    failing = f"{sys.executable} -c 'import sys; sys.exit(3)'"
    monkeypatch.setattr(script, "commands", lambda part, jobs: [failing, "not-reached"])
    assert script.main(["--only", "page"]) == 3
    assert "not-reached" not in capsys.readouterr().out


def test_the_page_part_gives_the_stored_tables(tmp_path):
    for name in (
        "megatron",
        "tools",
        "configs",
        "docs/lab",
        *(f"docs/results/{x}" for x in RESULTS),
    ):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("claims", "texts"):
        (tmp_path / "docs/results/arena" / f"{name}.csv").unlink()
    command = [sys.executable, "docs/lab/rebuild_arena.py", "--only", "page"]
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run(command, cwd=tmp_path, env=environ, check=True)
    written = [*(tmp_path / "docs").rglob("*.csv"), tmp_path / "docs/lab/arena_results.md"]
    assert len(written) > 20
    for path in written:
        assert path.read_text() == (ROOT / path.relative_to(tmp_path)).read_text(), path
