"""Test the command that makes the arena again."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
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
    trained, measured = capsys.readouterr().out.splitlines()
    given = "--set data=data/latex_text_document --set vocab=data/stand_in/latex.json"
    assert trained.startswith("$ python tools/sweep.py") and given in trained
    with (ROOT / "docs" / "results" / "arena_latex" / "runs.csv").open() as file:
        rows = [line.split(",")[:2] for line in file.read().splitlines()[1:]]
    assert sorted(trained.split(" --only ")[1:]) == sorted("-".join(row) for row in rows)
    assert measured.endswith("--out docs/results/arena_latex --jobs 3")


def test_a_text_that_is_not_prepared_is_named(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "run", pytest.fail)
    for name in ("data/prose_text_document.idx", "data/stand_in/prose.json"):
        assert script.main(["--only", "code", "prose"]) == 1
        assert capsys.readouterr().out.startswith(f"{tmp_path}/{name} is missing")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()


CALLS = """
import sys
print("reached", *sys.argv[1:], flush=True)
sys.exit({code})
"""


@pytest.mark.parametrize(
    "name, code, reached", [("sweep", 1, 2), ("sweep", 130, 1), ("table", 1, 1)]
)
def test_only_a_sweep_with_failed_runs_is_passed_over(
    script, monkeypatch, tmp_path, capfd, name, code, reached
):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / f"{name}.py").write_text(CALLS.format(code=code))
    (tmp_path / "last.py").write_text(CALLS.format(code=0))
    monkeypatch.setattr(script, "ROOT", tmp_path)
    commands = [f"python tools/{name}.py a", "python last.py"]
    monkeypatch.setattr(script, "commands", lambda part, jobs: commands)
    assert script.main(["--only", "page", "--stale", "keep"]) == code
    found = [line for line in capfd.readouterr().out.splitlines() if line.startswith("reached")]
    first = "reached a --stale keep" if name == "sweep" else "reached a"
    assert found == [first, "reached"][:reached]


STOPPED = """
import signal, sys, time
def stop(number, frame):
    print("stopping", number, flush=True)
    time.sleep(1)
    print("stopped", flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_command_end_in_its_own_way(tmp_path, number):
    (tmp_path / "slow.py").write_text(STOPPED)
    code = f"""
import sys
import rebuild_arena
rebuild_arena.ROOT = {str(tmp_path)!r}
rebuild_arena.commands = lambda part, jobs: ["python slow.py", "python never.py"]
sys.exit(rebuild_arena.main(["--only", "page"]))
"""
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'docs' / 'lab'}"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout and process.stdout.readline().startswith("$")
    assert process.stdout.readline() == "ready\n"
    if number == signal.SIGINT:  # as a terminal sends it: to all processes
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert (
        said.splitlines() == [f"stopping {number.value}", "stopped"] and process.returncode == 130
    )


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
