"""A command whose reader goes away (`| head -1`) ends quietly, and every command ends this way."""

import os
import subprocess
import sys

import pytest

from megatron.entry import NOBODY_READS
from tests.helpers.paths import ROOT

ENTRIES = [*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")]
CONFIG = ROOT / "configs" / "quickstart.yml"
SHARDS = ROOT / "tests" / "fixtures" / "data" / "corpus_text_document"


def without_reader(*command, unbuffered=""):
    """(exit code, stderr) of a command that writes into a pipe which nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120,
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
        ("tools/inspect_shards.py", SHARDS),
    ],
    ids=["train --check", "train --help", "evaluate --help", "inspect_shards"],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_nobody_reads_and_nothing_is_said(command, unbuffered):
    assert without_reader(*command, unbuffered=unbuffered) == (NOBODY_READS, "")


def test_every_command_ends_in_entry_run():
    commands = [path for path in ENTRIES if '__name__ == "__main__"' in path.read_text()]
    assert len(commands) >= 11
    for path in commands:
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


def test_with_triton_loaded_nothing_is_said_at_the_end():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM % "import triton"], cwd=ROOT, capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (3, b"")


def test_another_broken_pipe_is_an_error():
    program = PROGRAM % "raise BrokenPipeError('of a worker')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: of a worker\n")
