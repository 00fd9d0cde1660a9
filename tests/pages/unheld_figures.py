"""Name the figures of the pages that no test holds.

    python -m tests.pages.unheld_figures README.md docs/results.md
    python -m tests.pages.unheld_figures docs/lab/published_runs.md -- tests/pages tests/plan

The command changes the last digit of each figure, one figure at a time, and runs the tests that
read the page. If no test fails, it prints `page:line: figure` and the text around it. Code, links,
and the numbers of lists and of arXiv's papers are left out. The tests are those of `TESTS`, or
those after `--`.
"""

from __future__ import annotations

import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/pages", "tests/config/test_figures_of_the_configs.py")
FIGURE = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")
CODE = re.compile(
    r"```.*?```|`[^`\n]*`|\]\([^)]*\)|</?[a-z][^>]*>|^ *\d+\. |arXiv[ :][\d.]+|\[\d{4}\.\d{5}\]",
    re.S | re.M,
)
SLOW = 1.5
"""Tests that take longer than this, in seconds, are left out."""


class Mutations:
    """A pytest plugin that runs, in place of the test loop, the tests for each changed figure."""

    def __init__(self, pages: list[Path]) -> None:
        self.pages = pages
        self.changed: dict[Path, str] = {}
        self.read: set[Path] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._watch_reading()
        tests = defaultdict(list)
        for item in session.items:
            self.read.clear()
            begin = time.perf_counter()
            if self._passes(item):
                seconds = time.perf_counter() - begin
                for page in self.read & {*self.pages}:
                    tests[page].append((seconds, item))
        for page in self.pages:
            quick = [item for seconds, item in sorted(tests[page], key=lambda x: x[0])
                     if seconds < SLOW]  # fmt: skip
            self._report(page, quick)
        return True

    def _watch_reading(self) -> None:
        original, read_csv = Path.read_text, pd.read_csv
        tables: dict[Any, pd.DataFrame] = {}

        def read_text(path: Path, *args: Any, **options: Any) -> str:
            path = path.resolve()
            self.read.add(path)
            found = self.changed.get(path)
            return original(path, *args, **options) if found is None else found

        def read_once(path: Any, *args: Any, **options: Any) -> pd.DataFrame:
            key = str(path), repr(args), repr(options)
            if key not in tables:
                tables[key] = read_csv(path, *args, **options)
            return tables[key].copy()

        Path.read_text, pd.read_csv = read_text, read_once

    def _passes(self, item: pytest.Item) -> bool:
        reports = runtestprotocol(item, log=False, nextitem=None)
        return all(each.passed for each in reports)

    def _report(self, page: Path, items: list[pytest.Item]) -> None:
        text = page.read_text()
        name, unheld, count = page.relative_to(ROOT), 0, 0
        for begin, end in figures(text):
            count += 1
            self.changed[page] = text[: end - 1] + str((int(text[end - 1]) + 1) % 10) + text[end:]
            held = False
            for place, item in enumerate(items):
                if not self._passes(item):
                    held = True
                    items.insert(0, items.pop(place))
                    break
            del self.changed[page]
            if not held:
                unheld += 1
                line = text.count("\n", 0, begin) + 1
                around = " ".join(text[max(0, begin - 60) : end + 40].split())
                print(f"{name}:{line}: {text[begin:end]}  ...{around}...", flush=True)
        print(
            f"{name}: {unheld} of {count} figures are not held, by {len(items)} tests", flush=True
        )


def figures(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each figure outside code and links."""
    blank = CODE.sub(lambda found: re.sub(r"\d", " ", found[0]), text)
    for found in FIGURE.finditer(blank):
        yield found.span()


def main(arguments: list[str]) -> int:
    pages, _, tests = " ".join(arguments).partition(" -- ")
    plugin = Mutations([(ROOT / page).resolve() for page in pages.split()])
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--capture=fd", "-W", "ignore"]
    return pytest.main([*options, *(tests.split() or TESTS)], plugins=[plugin])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
