"""Name the figures of the pages that no test holds: each is changed, and the tests are run.

    python -m tests.pages.unheld_figures README.md docs/results.md
    python -m tests.pages.unheld_figures docs/lab/performance.md -- tests/plan

A figure is held if a test that reads the page fails when its last digit is another. The tests of
`TESTS` and of the folders after `--` are run, in this process. Code blocks and code spans are left
out. The command prints `page:line: figure` with its sentence for each figure that is not held.
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
TESTS = ("tests/pages", "tests/plan", "tests/tools", "tests/evaluation/suite", "tests/kernels")
FIGURE = re.compile(r"(?<![\w.,-])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?!\. [\[A-Z])")
CODE = re.compile(r"```.*?```|`[^`\n]*`|\]\([^)]*\)|<[^>]*>", re.S)
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
