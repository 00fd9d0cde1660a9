"""Find the places of a file that cosmic-ray's operators change, and draw mutants.

A site is a place and a kind of change, such as "another comparison here". Sites are drawn, then one
of the changes that the site allows: the eleven other operators of one `+` count once.

Left out are annotations, the key `frozen` of dataclasses, which type checkers judge, and the looks
of pictures (`LOOKS`).
"""

from __future__ import annotations

import ast
import difflib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import MutationVisitor, mutate_code

LOOKS = {"alpha", "capsize", "color", "figsize", "fontsize", "frameon", "frozen", "layout"}
LOOKS |= {"linestyle", "linewidth", "lw", "marker", "markersize", "ncols", "zorder"}
"""Keyword arguments whose values are not mutated."""
NAMES = [name for name in plugins.operator_names() if "Variable" not in name]
"""All operators but two, which put random numbers in the place of variables."""
Place = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        operator: The name of cosmic-ray's operator.
        before, after: The lines that differ, without indentation.
    """

    file: str
    line: int
    operator: str
    before: str
    after: str
    code: str = ""  # of the whole file

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


class _Finder(MutationVisitor):
    """Collects places instead of changing them."""

    def __init__(self, name: str):
        super().__init__(-1, plugins.get_operator(name)())
        self.places: list[Place] = []

    def visit(self, node):
        self.places += self.operator.mutation_positions(node)
        return node


def _excluded(code: str) -> list[Place]:
    """Return the places of annotations and of the looks of pictures."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.AnnAssign | ast.arg):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        elif isinstance(node, ast.keyword) and node.arg in LOOKS:
            found.append(node.value)
    places = []
    for node in found:
        if node and node.end_lineno and node.end_col_offset:
            end = (node.end_lineno, node.end_col_offset)
            places.append(((node.lineno, node.col_offset), end))
    return places


@cache
def _places(code: str) -> list[tuple[str, int, Place]]:
    """Return (operator, number of the change, place) of all changes of a file."""
    found, excluded = [], _excluded(code)
    tree = get_ast(code)
    for name in NAMES:
        finder = _Finder(name)
        finder.walk(tree)
        for number, place in enumerate(finder.places):
            if not any(low <= place[0] and place[1] <= high for low, high in excluded):
                found.append((name, number, place))
    return found


def _mutant(file: str, code: str, name: str, number: int) -> Mutant | None:
    """Return the mutant, or None if the change is none or is no Python."""
    changed = mutate_code(code, plugins.get_operator(name)(), number)
    try:
        if changed is None or ast.dump(ast.parse(changed)) == ast.dump(ast.parse(code)):
            return None
        compile(changed, file, "exec")
    except SyntaxError:
        return None
    old, new, line = code.splitlines(), changed.splitlines(), 0
    before, after = [], []
    for kind, low, high, low2, high2 in difflib.SequenceMatcher(
        None, old, new, False
    ).get_opcodes():
        if kind != "equal":
            line = line or low + 1
            before += old[low:high]
            after += new[low2:high2]
    texts = (" ".join(" ".join(lines).split()) for lines in (before, after))
    return Mutant(file, line, name.partition("/")[2], *texts, code=changed)


def draw(root: Path, files: list[str], seed: int, count: int) -> tuple[list[Mutant], int]:
    """Return `count` mutants of different sites, and the number of all sites."""
    sites = defaultdict(list)
    for file in files:
        for name, number, place in _places((root / file).read_text(encoding="utf-8")):
            sites[file, place, name.partition("_")[0]].append((name, number))
    keys, rng, drawn = sorted(sites), random.Random(seed), []
    rng.shuffle(keys)
    for file, place, kind in keys:
        if len(drawn) == count:
            break
        code = (root / file).read_text(encoding="utf-8")
        mutant = _mutant(file, code, *rng.choice(sites[file, place, kind]))
        if mutant:
            drawn.append(mutant)
    return drawn, len(keys)


def found_again(root: Path, old: Mutant) -> Iterator[Mutant]:
    """Yield the mutants of today's file that change the same line in the same way."""
    path = root / old.file
    if not path.is_file():
        return
    code = path.read_text(encoding="utf-8")
    first = old.before.split()[0] if old.before else ""
    lines = code.splitlines()
    for name, number, ((line, _), _) in _places(code):
        if name.endswith(f"/{old.operator}") and any(
            first in text for text in lines[max(0, line - 3) : line + 2]
        ):
            mutant = _mutant(old.file, code, name, number)
            if mutant and (mutant.before, mutant.after) == (old.before, old.after):
                yield mutant
