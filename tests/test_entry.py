"""Test what every command does first (check Python's version) and last (`entry.run`).

A command whose reader goes away (`| head -1`) ends quietly.
"""

import ast
import os
import shutil
import subprocess
import sys

import pytest

from megatron.entry import NOBODY_READS
from tests.helpers.paths import ROOT

ENTRIES = [*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")]
CONFIG = ROOT / "configs" / "quickstart.yml"
SHARDS = ROOT / "tests" / "fixtures" / "data" / "corpus_text_document"
COMMANDS = [path for path in ENTRIES if '__name__ == "__main__"' in path.read_text()]
OLDER_PYTHON = """
import functools, pathlib, pkgutil, runpy, sys
class NothingElse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in sys.stdlib_module_names and name not in ALLOWED:
            raise ModuleNotFoundError(f"{name} was imported before the check of Python's version")
ALLOWED = ("megatron", "megatron.entry")
sys.meta_path.insert(0, NothingElse())
sys.version_info, sys.executable = (3, 8, 10, "final", 0), "/usr/bin/python3"
del functools.cache  # new in 3.9
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def without_reader(*command, unbuffered=""):
    """Run a command whose stdout nobody reads, and return (exit code, stderr)."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=240,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("train.py", CONFIG, "--check"),
        ("train.py", "--help"),
        ("evaluate.py", "--help"),
        ("generate.py", "--help"),
        ("tools/inspect_shards.py", "SHARDS"),
    ],
    ids=["train --check", "train --help", "evaluate --help", "generate --help", "inspect_shards"],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_nobody_reads_and_nothing_is_printed(tmp_path, command, unbuffered):
    for suffix in (".bin", ".idx"):  # copied, because a picture is drawn beside the shards
        shutil.copy(f"{SHARDS}{suffix}", tmp_path)
    command = [tmp_path / SHARDS.name if word == "SHARDS" else word for word in command]
    assert without_reader(*command, unbuffered=unbuffered) == (NOBODY_READS, "")


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_an_older_python_is_refused_before_it_fails(path):
    done = subprocess.run(
        [sys.executable, "-c", OLDER_PYTHON, path], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        "error: Python 3.11 or newer is needed, but /usr/bin/python3 is Python 3.8; start the "
        "command with a newer one, e.g. python3.11\n",
    )


def test_an_older_python_can_parse_the_commands_up_to_the_check():
    entry = ROOT / "megatron" / "entry.py"
    oldest = {entry, ROOT / "train.py", ROOT / "evaluate.py"}
    for path in {*COMMANDS, entry}:
        text = path.read_text()
        ast.parse(text, feature_version=(3, 6) if path in oldest else (3, 8))
        assert path not in oldest or "from __future__ import annotations" not in text


def test_every_command_ends_in_entry_run():
    assert len(COMMANDS) >= 11
    for path in COMMANDS:
        assert path.read_text().rstrip().endswith("\n    entry.run(main)"), path


PROGRAM = """
import os, sys
from megatron import entry
def main():
    %s
    return 3
entry.run(main)
"""


@pytest.mark.parametrize(
    ("does", "code", "says"),
    [
        ("print('x' * 100_000)", NOBODY_READS, ""),
        ("pass", 3, ""),
        ("sys.exit('usage')", 1, "usage\n"),
        ("raise BrokenPipeError('of a worker')", NOBODY_READS, ""),
    ],
)
def test_exit_codes_without_a_reader(does, code, says):
    assert without_reader("-c", PROGRAM % does) == (code, says)


def test_without_any_stdout_the_exit_code_is_the_commands():
    command = f'{sys.executable} -c "{PROGRAM % "print(1)"}" >&-'
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize("does", ["sys.stdout.close()", "import io; sys.stdout = io.StringIO()"])
def test_with_another_stdout_the_exit_code_is_the_commands(does):
    done = subprocess.run([sys.executable, "-c", PROGRAM % does], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (3, b"")


def test_with_triton_loaded_nothing_is_printed_at_the_end():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM % "import triton"],
        cwd=ROOT,
        capture_output=True,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (3, b"")


def test_another_broken_pipe_is_an_error():
    program = PROGRAM % "raise BrokenPipeError('of a worker')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: of a worker\n")
