"""Find and parse the project's own source files, for tests that check them."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SKIPPED = {"data", "runs", "venv"}
"""Folders in the root that contain no source code of the project."""
COMMANDS = ("train.py", "evaluate.py", "generate.py", "prepare_data.py")
PRODUCT = ("megatron", "tools", *COMMANDS)


def sources(root: Path, *tops: str, suffix: str = ".py") -> list[Path]:
    """Return the sorted files below `root`; with `tops`, only those in these folders and files."""
    found = []
    for path in sorted(root.rglob(f"*{suffix}")):
        parts = path.relative_to(root).parts
        if parts[0] in SKIPPED or any(part.startswith(".") for part in parts):
            continue
        if not tops or parts[0] in tops:
            found.append(path)
    return found


def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which is parsed only once for all tests."""
    return _parsed(path.read_text(encoding="utf-8"), str(path))


@cache
def _parsed(text: str, name: str) -> ast.Module:
    return ast.parse(text, filename=name)


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield every string that is a statement: docstrings and descriptions of attributes."""
    for node in ast.walk(tree):
        alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if alone and isinstance(node.value.value, str):
            yield node.value


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of the docstrings, comments and error texts of a Python file."""
    text, tree = path.read_text(encoding="utf-8"), parsed(path)
    for each in docstrings(tree):
        yield from enumerate(each.value.splitlines(), each.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value
