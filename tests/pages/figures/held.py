"""What tests of pages share: pages, number formats, constants of files, configs, grids, results.

A page is read again for each sentence, because `tests/pages/unheld_figures.py` changes pages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from megatron.config import Config, load_config
from tests.helpers.paths import CONFIGS, ROOT
from tools.experiments.grid import Grid, read_grid

LAB, RESULTS = ROOT / "docs" / "lab", ROOT / "docs" / "results"
QUICKSTART = load_config([CONFIGS / "quickstart.yml"])
HAND_SCALE = [
    ("The paper's comparison at hand-scale", "code"),
    ("On prose", "prose"),
    ("On LaTeX", "latex"),
]
"""The headings of the hand-scale grid in docs/lab/measurements.md, and its folders of CSV files."""
NEEDED = (
    "num_layers=2 hidden_size=64 num_attention_heads=2 seq_length=8 train_iters=1 data_path=none "
    "optimizer.params.lr=1 train_batch_size=1"
)
WORDS = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen"),
]


def one_line(page: Path) -> str:
    return re.sub(r"\n *", " ", page.read_text())


def rows(page: Path, heading: str, start: str = "|") -> list[dict[str, str]]:
    """Return the rows of a table under a heading of a page, by the table's column names.

    Args:
        start: How the table begins; the first one under the heading that begins so is read.
    """
    section = re.split(r"\n#+ ", re.split(f"#+ {heading}\n", page.read_text())[1])[0]
    table = section[section.index(f"\n{start}") :].strip().split("\n\n")[0]
    lines = table.splitlines()
    names, _, *cells = ([cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines)
    return [dict(zip(names, each, strict=True)) for each in cells]


def says(page: str, *sentences: str) -> None:
    """Assert that a page has all these sentences.

    Args:
        page: Its path from docs/, without `.md`, such as "lab/plan" and "../README".
    """
    text = one_line(ROOT / "docs" / f"{page}.md")
    missing = [each for each in sentences if each not in text]
    assert not missing, f"docs/{page}.md does not say {missing}"


def assert_rounded(text: str, value: float) -> None:
    decimals = len(text.partition(".")[2])
    rounded = f"{value:,.{decimals}f}"
    assert text == rounded, f"the page has {text}, and the value is {value}"


def scientific(number: float, digits: int = 0) -> str:
    """Return "1e-9", with more digits "1.2e-9"."""
    return f"{number:.{digits}e}".replace("e-0", "e-")


def word(count: int) -> str:
    return WORDS[count]


def and_list(values: Iterable[Any]) -> str:
    """Return "1, 2 and 3"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}"


def or_list(values: Iterable[Any]) -> str:
    return and_list(values).replace(" and", " or")


def constant(file: str, name: str) -> Any:
    """Return the value of a constant of a Python file, without an import of the file.

    This is for files of tests and scripts of docs/lab, which tests do not import.
    """
    for node in ast.parse((ROOT / file).read_text()).body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            found = [getattr(each, "id", "") for each in names]
            if name in found:
                values = node.value.elts if isinstance(target, ast.Tuple) else [node.value]
                return ast.literal_eval(values[found.index(name)])
    raise AssertionError(f"{file} has no constant {name}")


def smallest(*overrides: str, processes: int = 1) -> Config:
    """Return a config of the required keys and the overrides, with the defaults of other keys."""
    return load_config([], [*NEEDED.split(), *overrides], world_size=processes)


def yml(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / name).read_text())


@cache
def grid(name: str) -> Grid:
    return read_grid(CONFIGS / "paper" / f"{name}.yml")


def perplexities(folder: str) -> pd.DataFrame:
    """Return the rows of a grid's results that are perplexities."""
    results = pd.read_csv(RESULTS / folder / "results.csv")
    return results[results["metric"] == "perplexity"]


def means(folder: str) -> pd.DataFrame:
    """Return a grid's mean perplexities, by embedding and length."""
    return perplexities(folder).pivot_table("value", "embedding", "length")


def first_command() -> tuple[str, str]:
    """Return the minutes of README's first command, and those on a slower machine."""
    table = rows(LAB / "measurements.md", "Measured once")
    (value,) = (row["value"] for row in table if row["what"].startswith("the first command"))
    fast, slow = re.findall(r"([\d.]+) ", value)
    return fast, slow


def preparation_memory() -> list[tuple[str, str]]:
    """Return pairs (peak memory of the preparation, size of its text), such as ("1 MB", "8 MB")."""
    report = (ROOT / "benchmarks" / "results" / "data_prep.md").read_text()
    return re.findall(r"(\d+ MB) for (\d+ MB)", report)


class Trained(NamedTuple):
    """A line of tests/distributed/matrix.log: a layout, a model and a precision.

    Attributes:
        several: Whether the model has several embeddings.
        error: The largest difference of a metric from one process.
    """

    processes: int
    zero_stage: int
    precision: str
    several: bool
    error: float


def matrix_log() -> tuple[list[Trained], str]:
    """Return the lines of the log of layouts, all of which passed, and its comments."""
    lines = (ROOT / "tests" / "distributed" / "matrix.log").read_text().splitlines()
    pattern = re.compile(
        r"tp(\d+)(?:sp)?-cp(\d+)-pp(\d+)-dp(\d+)-z(\d)-(fp32|bf16)-(\w+)-\S+"
        r" +(\S+) \(at most \S+\) ok"
    )
    cells = []
    for line in lines:
        if not line.startswith("#"):
            *sizes, stage, precision, model, error = pattern.fullmatch(line).groups()
            several = model in ("cross", "layers")
            ranks = prod(map(int, sizes))
            cells.append(Trained(ranks, int(stage), precision, several, float(error)))
    return cells, "\n".join(line for line in lines if line.startswith("#"))


def largest_errors(cells: Sequence[Trained]) -> str:
    """Return the largest errors in words, such as "1.2e-6 in fp32 and 1.2e-3 in bf16"."""
    largest = (max(x.error for x in cells if x.precision == kind) for kind in ("fp32", "bf16"))
    return "{} in fp32 and {} in bf16".format(*(scientific(each, 1) for each in largest))
