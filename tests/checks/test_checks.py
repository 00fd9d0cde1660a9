"""Test that ruff, codespell and basedpyright find nothing, and that each would find a fault.

`make check` runs the same tools, as do the hooks of pre-commit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.sources import COMMANDS


def run_tool(folder: Path, *words: str) -> tuple[int, str]:
    """Run `python -m WORDS` in a folder; return its exit code and what it printed."""
    command = [sys.executable, "-m", *words]
    # basedpyright runs in Node. With more room for objects, Node collects garbage less often.
    room = "--max-semi-space-size=256 --max-old-space-size=8192"
    options = f"{os.environ.get('NODE_OPTIONS', '')} {room}"
    environ = os.environ | {"NODE_OPTIONS": options.strip()}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environ)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("tool", ["ruff check .", "ruff format --check .", "codespell_lib"])
def test_the_tool_finds_nothing(repo_root, tool):
    code, printed = run_tool(repo_root, *tool.split())
    assert code == 0, printed


def basedpyright(folder: Path) -> str:
    """Return basedpyright's report on a folder with a pyproject.toml."""
    return run_tool(folder, "basedpyright", "--pythonpath", sys.executable)[1]


def test_the_types_are_right(repo_root):
    """Check everything that pyproject.toml names: megatron/, tools/ and the commands."""
    report = basedpyright(repo_root)
    assert report.rstrip().endswith("0 errors, 0 warnings, 0 notes"), report


def test_the_type_checker_sees_a_wrong_type(repo_root, tmp_path):
    shutil.copy(repo_root / "pyproject.toml", tmp_path)
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "a.py").write_text("x: int = 'a'\n")
    report = basedpyright(tmp_path)
    assert "reportAssignmentType" in report and "1 error," in report


@pytest.fixture
def clone(repo_root, tmp_path) -> Path:
    """Return a git repository with the hooks' configuration and correct files."""
    folder = tmp_path / "clone"
    for name in ("megatron", "tools", "tests/parity"):
        (folder / name).mkdir(parents=True)
    for name in ("pyproject.toml", ".pre-commit-config.yaml"):
        shutil.copy(repo_root / name, folder)
    for name in COMMANDS:
        (folder / name).write_text("")
    (folder / "megatron" / "a.py").write_text("x = 1  # the first\n")
    subprocess.run(["git", "init", "-q", folder], check=True)
    return folder


def run_hooks(folder: Path, stage: str) -> tuple[int, str]:
    """Run the hooks of a stage on all files; return pre-commit's exit code and its report."""
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "run", "--all-files", "--hook-stage", stage],
        env=os.environ | {"PATH": tools, "PRE_COMMIT_HOME": str(folder.parent / "home")},
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    "text, stage, hook",
    [
        ("x  =  1\n", "pre-commit", "ruff format"),
        ("import os\n", "pre-commit", "ruff check"),
        ("# In teh end\n", "pre-commit", "codespell"),  # codespell:ignore teh
        ("x: int = 'a'\n", "pre-push", "basedpyright"),
    ],
)
def test_a_hook_stops_a_fault(clone, text, stage, hook):
    code, printed = run_hooks(clone, stage)
    assert code == 0 and f"\n{hook}" in f"\n{printed}", printed
    (clone / "megatron" / "a.py").write_text(text)
    code, printed = run_hooks(clone, stage)
    failed = [line.partition("..")[0] for line in printed.splitlines() if line.endswith("Failed")]
    assert code == 1 and failed == [hook], printed
