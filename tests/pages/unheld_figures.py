"""Name the figures of pages that no test holds.

    python -m tests.pages.unheld_figures README.md docs/results.md
    python -m tests.pages.unheld_figures docs/lab/published_runs.md --tests tests/pages tests/plan

The command changes the last digit of each figure, one figure at a time, and runs the tests that
read the page by `Path.read_text`. If no test fails, it prints `page:line: figure` and the text
around it. Code, links, words such as "three", and the numbers of lists and of arXiv's papers are
left out, and so are tests that take longer than `SLOW` seconds; these are named. The exit code is
1 if a figure is not held.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from _pytest.runner import runtestprotocol

FIGURE = re.compile(r"(?<![\w.,])(?<!\w-)\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?")
CODE = re.compile(
    r"```.*?```|`[^`\n]*`|\]\([^)]*\)|</?[a-z][^>]*>|^ *\d+\. |arXiv[ :][\d.]+|\[\d{4}\.\d{5}\]",
    re.S | re.M,
)
SLOW = 3.0


class Mutations:
    """A pytest plugin that runs, in place of the test loop, the tests for each changed figure.

    Attributes:
        unheld: The figures that no test holds, as `page:line: figure`.
    """

    def __init__(self, pages: Sequence[Path]) -> None:
        self.pages = [page.resolve() for page in pages]
        self.unheld: list[str] = []
        self._changed: dict[Path, str] = {}
        self._read: set[Path] = set()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            self._watch_reading(patch)
            tests = defaultdict(list)
            for item in session.items:
                self._read.clear()
                if self._passes(item) and (pages := self._read & {*self.pages}):
                    begin = time.perf_counter()
                    self._passes(item)  # the first time, it may have filled a cache
                    if time.perf_counter() - begin > SLOW:
                        print(f"left out, because it is slow: {item.nodeid}", flush=True)
                    else:
                        for page in pages:
                            tests[page].append(item)
            for page in self.pages:
                self._change_each(page, tests[page])
        return True

    def _watch_reading(self, patch: pytest.MonkeyPatch) -> None:
        """Note which files a test reads, and give it the changed pages."""
        original, read_csv = Path.read_text, pd.read_csv
        tables: dict[Any, pd.DataFrame] = {}

        def read_text(path: Path, *args: Any, **options: Any) -> str:
            self._read.add(path := path.resolve())
            found = self._changed.get(path)
            return original(path, *args, **options) if found is None else found

        def read_once(path: Any, *args: Any, **options: Any) -> pd.DataFrame:
            key = str(path), repr(args), repr(options)
            if key not in tables:
                tables[key] = read_csv(path, *args, **options)
            return tables[key].copy()

        patch.setattr(Path, "read_text", read_text)
        patch.setattr(pd, "read_csv", read_once)

    def _passes(self, item: pytest.Item) -> bool:
        return all(report.passed for report in runtestprotocol(item, log=False, nextitem=None))

    def _change_each(self, page: Path, items: list[pytest.Item]) -> None:
        text, before, count = page.read_text(), len(self.unheld), 0
        for begin, end in figures(text):
            count += 1
            self._changed[page] = text[: end - 1] + str((int(text[end - 1]) + 1) % 10) + text[end:]
            failed = next((item for item in items if not self._passes(item)), None)
            del self._changed[page]
            if failed:  # it may hold the next figure, too
                items.remove(failed)
                items.insert(0, failed)
                continue
            line = text.count("\n", 0, begin) + 1
            self.unheld.append(f"{page.name}:{line}: {text[begin:end]}")
            around = " ".join(text[max(0, begin - 60) : end + 40].split())
            print(f"{self.unheld[-1]}  ...{around}...", flush=True)
        unheld = len(self.unheld) - before
        print(f"{page.name}: {unheld} of {count} figures are not held by {len(items)} tests")


def figures(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each figure outside code and links."""
    blank = CODE.sub(lambda found: re.sub(r"\d", " ", found[0]), text)
    for found in FIGURE.finditer(blank):
        yield found.span()


def main(arguments: list[str] | None = None) -> int:
    """Print the figures that no test holds, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE.md")
    parser.add_argument("--tests", nargs="+", default=["tests/pages"], help="[%(default)s]")
    given = parser.parse_args(arguments)
    missing = [str(page) for page in given.pages if not page.is_file()]
    if missing:
        parser.error(f"no such file: {', '.join(missing)}")
    plugin = Mutations(given.pages)
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", *given.tests]
    code = pytest.main(options, plugins=[plugin])
    return int(code) or int(bool(plugin.unheld))


if __name__ == "__main__":
    sys.exit(main())
