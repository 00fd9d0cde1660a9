"""Test limits that can be counted: sizes of files and functions, equal bodies, private names.

Each rule is also tested on a made-up tree that breaks it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests import measure_code
from tests.helpers.sources import PRODUCT, parsed, sources

MAX_LINES = 300
"""The largest number of lines in a file."""
MAX_FUNCTION = 60
"""The largest number of lines in a function other than `parse_arguments` (a long list)."""
MAX_FILES = 18
"""The largest number of Python files in a folder other than `megatron/positional`."""
MAX_GUARDS = 5.0
"""The most `except` and `suppress` per 1,000 lines of the product (blank lines excluded)."""
OWN = (*PRODUCT, "benchmarks", "tests")


def long_files(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}: {lines} lines, more than {MAX_LINES}"
        for path in sources(root)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    ]


def long_functions(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{node.lineno}: {node.name} has {lines} lines"
        for path in sources(root, *OWN)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name != "parse_arguments"
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION
    ]


def full_folders(root: Path) -> list[str]:
    folders = Counter(path.parent.relative_to(root).as_posix() for path in sources(root, *OWN))
    del folders["megatron/positional"]
    return [f"{name}: {n} files" for name, n in folders.items() if n > MAX_FILES]


def repeated_names(root: Path) -> list[str]:
    """Return test files that share a name with another test file."""
    places: dict[str, list[str]] = {}
    for path in sources(root, "tests"):
        if path.name not in ("__init__.py", "conftest.py"):
            places.setdefault(path.name, []).append(str(path.relative_to(root)))
    return [", ".join(found) for found in places.values() if len(found) > 1]


def changed_import_paths(root: Path) -> list[str]:
    """Return the places that change `sys.path`, also in code that tests pass to Python."""
    return [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in sources(root)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\bsys\.path(\.\w+\(|\[| *\+?= )", line)
    ]


def guards(root: Path) -> list[str]:
    """Return each `except` and `suppress` of the product, if there are more than `MAX_GUARDS`."""
    found, lines = [], 0
    for path in sources(root, *PRODUCT):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            lines += bool(line.strip()) and not line.strip().startswith("#")
            if re.match(r"\s*except\b|.*\bsuppress\(", line):
                found.append(f"{path.relative_to(root)}:{number}: {line.strip()}")
    rate = 1000 * len(found) / max(1, lines)
    summary = f"{len(found)} in {lines} lines: {rate:.1f} per 1,000, more than {MAX_GUARDS}"
    return [*found, summary] if rate > MAX_GUARDS else []


def borrowed_private_names(root: Path) -> list[str]:
    """Return names with a leading underscore that are used outside the module that defines them."""
    trees = {path: parsed(path) for path in sources(root, *OWN)}
    defined = {path: private_definitions(tree) for path, tree in trees.items()}
    anywhere = set().union(*defined.values())
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names if is_private(alias.name)]
            elif isinstance(node, ast.Attribute) and is_private(node.attr):
                names = [node.attr] if node.attr in anywhere - defined[path] else []
            found += [f"{path.relative_to(root)}:{node.lineno}: {name}" for name in names]
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def private_definitions(tree: ast.Module) -> set[str]:
    """Return the functions, classes, variables and attributes of a module that are private."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def repeated_bodies(root: Path) -> list[str]:
    """Return functions whose bodies are equal after names and literals are replaced."""
    return measure_code.repeated_bodies(root)


RULES = [
    long_files,
    long_functions,
    full_folders,
    repeated_names,
    changed_import_paths,
    guards,
    borrowed_private_names,
    repeated_bodies,
]


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rule(repo_root, rule):
    found = rule(repo_root)
    assert not found, f"{len(found)} places\n" + "\n".join(found)


def function(lines: int, name: str = "f") -> str:
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1)


def adds(name: str, lines: int, step: str = "1") -> str:
    """Return a function that adds `step` to a value until its body has `lines` lines."""
    steps = "".join(f"    {name}{i} = {name}{i - 1} + {step}\n" for i in range(1, lines))
    return f"def {name}({name}0):\n{steps}    return {name}{lines - 1}\n"


PATH = "sys" + ".path"  # this file keeps the rule too
BROKEN = [
    (long_files, {"tests/a.py": "x = 1\n" * 301}, "tests/a.py: 301 lines"),
    (long_functions, {"tools/a.py": "x = 1\n" + function(61)}, "tools/a.py:2: f has 61"),
    (full_folders, {f"tools/x/a{i}.py": "" for i in range(19)}, "tools/x: 19 files"),
    (repeated_names, {"tests/a/x.py": "", "tests/b/x.py": ""}, "tests/a/x.py, tests/b/x.py"),
    (changed_import_paths, {"tests/a.py": f"import sys\n{PATH}.insert(0, 'x')"}, "tests/a.py:2"),
    (changed_import_paths, {"tools/a.py": f"{PATH}[:0] = ['x']"}, "tools/a.py:1"),
    (changed_import_paths, {"tools/a.py": f"{PATH} += ['x']"}, "tools/a.py:1"),
    (borrowed_private_names, {"tools/a.py": "from tools.b import _x"}, "tools/a.py:1: _x"),
    (borrowed_private_names, {"tools/a.py": "b._x = 1", "tools/b.py": "a._x"}, "tools/b.py:1: _x"),
    (borrowed_private_names, {"tests/a.py": "b._x()", "tools/b.py": "def _x(): 1"}, "tests/a.py:1"),
    (repeated_bodies, {"tools/a.py": adds("f", 6) + adds("g", 6, "'x'")}, "tools/a.py:1: f, tools"),
    (repeated_bodies, {"megatron/a.py": adds("f", 6), "train.py": adds("g", 6)}, "megatron/a.py:1"),
]
ALLOWED = [
    (long_files, {"tests/a.py": "x = 1\n" * 300}),
    (long_functions, {"train.py": function(60) + function(99, "parse_arguments")}),
    (full_folders, {f"megatron/positional/a{i}.py": "" for i in range(19)}),
    (repeated_names, {"tests/conftest.py": "", "tests/a/conftest.py": "", "tests/a/x.py": ""}),
    (changed_import_paths, {"tools/a.py": f"import sys\nprint({PATH})"}),
    (guards, {"tools/a.py": "x = 1\n" * 997 + "try:\n    1\nexcept E:\n    # except F\n    2"}),
    (borrowed_private_names, {"tools/a.py": "import torch\ntorch._C\n_x = 1\nself._x = _x"}),
    (repeated_bodies, {"tools/a.py": adds("f", 5) + adds("g", 5)}),
    (repeated_bodies, {"tools/a.py": adds("f", 6) + adds("g", 7) + adds("h", 6, "f(1)")}),
    (repeated_bodies, {"tests/a.py": adds("f", 6), "tools/a.py": adds("g", 6)}),
]


def make_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("rule, files, why", BROKEN)
def test_a_rule_sees_its_violation(tmp_path, rule, files, why):
    make_tree(tmp_path, files)
    found = rule(tmp_path)
    assert len(found) == 1 and found[0].startswith(why), found


@pytest.mark.parametrize("rule, files", ALLOWED)
def test_a_rule_lets_the_rest_be(tmp_path, rule, files):
    make_tree(tmp_path, files)
    assert rule(tmp_path) == []


def test_guards_are_counted_by_the_thousand(tmp_path):
    text = "try:\n    1\nexcept E:\n    2\nwith suppress(E):\n    3\n"
    make_tree(tmp_path, {"megatron/a.py": text, "tests/a.py": text, "train.py": "x = 1\n" * 334})
    assert guards(tmp_path) == [
        "megatron/a.py:3: except E:",
        "megatron/a.py:5: with suppress(E):",
        "2 in 340 lines: 5.9 per 1,000, more than 5.0",
    ]
    make_tree(tmp_path, {"prepare_data.py": "x = 1\n" * 60})
    assert guards(tmp_path) == []


MEASURED = '''"""A module."""
# It adds.
X = 1


def f():
    """Return
    2."""
    return (
        # one
        X
        + 1
    )  # two
'''


def test_code_lines_are_no_comments_docstrings_or_blank_lines(tmp_path, capsys):
    files = {"megatron/x/a.py": MEASURED, "megatron/b.py": "x = 1\n", "tests/a.py": MEASURED}
    make_tree(tmp_path, files)
    measure_code.report(tmp_path, minimum=6, longest=1)
    printed = capsys.readouterr().out
    assert "      7 code lines in megatron\n      6 code lines in megatron/x\n" in printed
    assert "      0 groups of equal bodies of 6" in printed
    assert printed.endswith("in lines:\n      8 megatron/x/a.py: f\n")
