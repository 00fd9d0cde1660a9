"""Measure the code: print code lines, function bodies that stand twice, and the longest functions.

`python -m tests.measure_code` measures this tree, `--root` another checkout. A code line holds a
part of a statement: no blank line, no comment, no docstring of a module, class or function.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.sources import PRODUCT, parsed, sources

MIN_BODY = 6
"""Shorter bodies, in code lines, may be equal."""
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(path: Path) -> set[int]:
    """Return the numbers of the lines that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    found = set()
    for token in tokens:
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parsed(path)):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and ast.get_docstring(node):
            found.difference_update(range(node.body[0].lineno, _end(node.body[0]) + 1))
    return found


def functions(path: Path) -> Iterator[Function]:
    """Yield every function and method of a file, inner ones too."""
    return (node for node in ast.walk(parsed(path)) if isinstance(node, Function))


def shape(function: Function) -> str:
    """Return the body of a function as text in which every name and every literal is `_`."""
    return " ".join(_shape(statement) for statement in statements(function))


def statements(function: Function) -> list[ast.stmt]:
    """Return the body of a function without its docstring."""
    return function.body[1:] if ast.get_docstring(function) else function.body


def _shape(node: object) -> str:
    if isinstance(node, ast.Constant):
        return "_"
    if isinstance(node, ast.AST):
        fields = [_shape(value) for _, value in ast.iter_fields(node)]
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_shape, node))}]"
    return "-" if node is None else "_"


def repeated_bodies(root: Path, minimum: int = MIN_BODY) -> list[str]:
    """Return the groups of functions with equal bodies (see `shape`), one line for each group.

    Args:
        root: The checkout, of which the product is compared.
        minimum: The number of code lines that the longest body of a group has at least.
    """
    groups: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for path in sources(root, *PRODUCT):
        lines = code_lines(path)
        for function in functions(path):
            if body := statements(function):
                length = sum(body[0].lineno <= number <= _end(body[-1]) for number in lines)
                place = f"{path.relative_to(root)}:{function.lineno}: {function.name}"
                groups[shape(function)].append((length, place))
    return [
        ", ".join(place for _, place in found)
        for found in groups.values()
        if len(found) > 1 and max(found)[0] >= minimum
    ]


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def report(root: Path, minimum: int, longest: int) -> None:
    """Print code lines by package, groups of equal bodies, and the longest functions."""
    counts: Counter[str] = Counter()
    lengths = []
    for path in sources(root, *PRODUCT):
        place = path.relative_to(root)
        for package in {place.parts[0], "/".join(place.parts[:-1][:2]) or place.name}:
            counts[package] += len(code_lines(path))
        for function in functions(path):
            lengths.append((_end(function) - function.lineno + 1, f"{place}: {function.name}"))
    for package, count in sorted(counts.items()):
        print(f"{count:7,} code lines in {package}")
    groups = repeated_bodies(root, minimum)
    print(
        f"\n{len(groups):7,} groups of equal bodies of {minimum} or more code lines",
        *groups,
        sep="\n",
    )
    print("\nThe longest functions, in lines:")
    for length, name in sorted(lengths, reverse=True)[:longest]:
        print(f"{length:7,} {name}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=Path(), help="the root of a checkout")
    parser.add_argument("--lines", type=int, default=MIN_BODY, help="of the equal bodies to print")
    parser.add_argument("--longest", type=int, default=5, help="how many functions to print")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_arguments()
    report(arguments.root.resolve(), arguments.lines, arguments.longest)
