"""Test the command that names the figures of a page that no test holds."""

import subprocess
import sys

from tests.helpers.paths import ROOT
from tests.pages.unheld_figures import figures

PAGE = """1. It takes 3.5 s for 1,024 tokens, see [page 9](page9.md) and arXiv 2205.09921.
2. `--steps 7` gives 1e-9, and <img width=300> -20% [-25, 2-3]. Then 4.

```
step 8
```
"""
TESTS = """
from pathlib import Path

PAGE = Path(__file__).with_name("page.md")

def test_held():
    assert "It takes 3.5 s" in PAGE.read_text()

def test_another_file():
    assert Path(__file__).read_text()
"""


def test_only_the_figures_of_sentences_are_changed():
    found = [PAGE[begin:end] for begin, end in figures(PAGE)]
    assert found == ["3.5", "1,024", "9", "1e-9", "20", "25", "2", "4"]


def test_the_command_names_a_figure_that_no_test_holds(tmp_path):
    page, tests = tmp_path / "page.md", tmp_path / "test_page.py"
    page.write_text("It takes 3.5 s\nand 7 GB.\n")
    tests.write_text(TESTS)
    command = [sys.executable, "-m", "tests.pages.unheld_figures", str(page)]
    done = subprocess.run(
        [*command, "--tests", str(tests)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "page.md:2: 7  ..." in done.stdout and "3.5" not in done.stdout.split("...")[0]
    assert "page.md: 1 of 2 figures are not held by 1 tests" in done.stdout
    page.write_text("It takes 3.5 s\n")
    assert not subprocess.run([*command, "--tests", str(tests)], cwd=ROOT).returncode
