"""Test which packages import which, by the floors of ARCHITECTURE.md.

    F6 harness pretraining   F5 evaluation generation hub plan rehearsal   F4 engine
    F3 model   F2 attention   F1 data parallel kernels positional   F0 config

A package imports only from floors strictly below its own, so packages of one floor never import
each other. This also holds for imports inside functions. Large packages have shelves, which are
floors inside the package. No two modules import each other, not even for type checking.
`broken_rule` has the other rules. The last tests show, on made-up trees, that the checker sees each
kind of violation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.sources import parsed, sources

FLOORS = {
    "config": 0,
    "data": 1, "parallel": 1, "kernels": 1, "positional": 1,
    "attention": 2,
    "model": 3,
    "engine": 4,
    "evaluation": 5, "generation": 5, "hub": 5, "plan": 5, "rehearsal": 5,
    "harness": 6, "pretraining": 6,
}  # fmt: skip
MOST_ENGINE_FILES = 60
"""The largest number of Python files in `engine`, which holds what training needs."""
SHELVES = {
    "config": {
        "errors": 0, "per_layer": 0, "mlp_width": 0, "builtin": 0,
        "reader": 1,
        "fields": 2,
        "choices": 3, "paths": 3, "theta_fields": 3, "flat": 3,
        "sections": 4, "rules": 4,
        "schema": 5, "derived": 5,
        "neox": 6, "describe": 6,
        "load": 7,
        "command_line": 8,
    },
    "data": {
        "errors": 0, "locks": 0,
        "tokenizers": 1,
        "shards": 2,
        "samples": 3, "prepare": 3,
        "corpora": 4, "tasks": 4,
    },
    "engine": {
        "errors": 0,
        "safe_load": 1, "model_shape": 1, "gpus": 1,
        "build": 2,
        "local_model": 3, "run_log": 3,
        "job": 4, "training": 4, "neox": 4,
        "checkpoint": 5, "open_text": 5,
        "job_data": 6, "open_run": 6,
    },
}  # fmt: skip
"""Package -> the floors of its sub-packages and modules (shelves), lowest first."""


@dataclass(frozen=True)
class Import:
    module: str  # absolute, e.g. megatron.config
    line: int
    at_import: bool  # runs when the file is imported: not in a function, not under TYPE_CHECKING

    def is_from(self, package: str) -> bool:
        return self.module == package or self.module.startswith(package + ".")


def imports(path: Path, root: Path) -> Iterator[Import]:
    """Yield every import of the file `path`; relative imports are made absolute."""
    tree = parsed(path)
    package = path.relative_to(root).with_suffix("").parts[:-1]

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(name.name, node.lineno, at_import)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            start = ".".join((*base, *([node.module] if node.module else [])))
            # `from megatron import data` names a package by what it imports, not whence.
            for name in node.names:
                yield Import(f"{start}.{name.name}", node.lineno, at_import)
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        for child in ast.iter_child_nodes(node):
            yield from walk(child, at_import and not lazy)

    yield from walk(tree, True)


def own_package(path: Path, root: Path) -> str | None:
    """Return `config` for megatron/config/load.py, "" for megatron/x.py, None outside megatron."""
    parts = path.relative_to(root).parts
    if parts[0] != "megatron":
        return None
    return parts[1] if len(parts) > 2 else ""


def broken_shelf(module: str, found: Import) -> str | None:
    """Return why `module` of a package with shelves must not have this import, or None."""
    _, package, own, *_ = [*module.split("."), "", ""]
    shelves = SHELVES.get(package, {})
    if not own or not shelves or not found.is_from(f"megatron.{package}"):
        return None
    target = found.module.removeprefix(f"megatron.{package}").lstrip(".").partition(".")[0]
    for name in (own, target):
        if name not in shelves:
            return f"{package}/{name} has no shelf; known: {', '.join(shelves)}"
    if target != own and shelves[target] >= shelves[own]:
        return f"{package}/{own} reaches up or across to {package}/{target}"
    return None


def cycles(root: Path) -> list[str]:
    """Return groups of modules of megatron/ that import each other in a cycle of any length."""
    modules = {".".join(p.relative_to(root).with_suffix("").parts): p for p in sources(root)}
    modules = {n.removesuffix(".__init__"): p for n, p in modules.items() if n[:9] == "megatron."}

    def target(name: str) -> str | None:
        """Return the module that `import name` or `from ... import name` loads."""
        parent = name.rpartition(".")[0]
        return name if name in modules else parent if parent in modules else None

    graph = {
        name: {target(each.module) for each in imports(path, root)} - {None, name}
        for name, path in modules.items()
    }
    left = dict(graph)
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    while free := [name for name in left if not any(name in needs for needs in left.values())]:
        for name in free:  # they only lead to a circle
            del left[name]
    return [f"import each other: {', '.join(sorted(left))}"] if left else []


def broken_rule(own: str | None, found: Import) -> str | None:
    """Return why code of the package `own` must not have this import, or None."""
    if found.is_from("deepspeed") and own not in ("engine", "plan"):
        return "only megatron/engine and megatron/plan may import deepspeed"
    if own is None:
        return None
    parts = found.module.split(".")
    if own == "" and parts[0] == "megatron" and len(parts) > 1 and parts[1] in FLOORS:
        return "modules of megatron/ itself stand below all floors"
    if found.is_from("pydantic") and own not in ("config", "engine"):
        return "pydantic belongs to megatron/config, megatron/engine and the entry points"
    if found.is_from("torch") and own == "config":
        return "megatron/config works without torch"
    if found.is_from("triton") and own != "kernels" and found.at_import:
        return "only megatron/kernels may import triton at module level"
    if (found.is_from("matplotlib") or found.is_from("wandb")) and found.at_import:
        return "import it inside the function that needs it"
    if found.is_from("megatron.config"):
        if own in ("positional", "parallel", "kernels"):
            return f"megatron/{own} never sees the configuration"
        if own in ("attention", "model") and found.at_import:
            return f"megatron/{own} takes values and must import without pydantic"
    if own and parts[0] == "megatron" and len(parts) > 1 and parts[1] in FLOORS:
        target = parts[1]
        if target != own and FLOORS[target] >= FLOORS[own]:
            return f"megatron/{own} (F{FLOORS[own]}) reaches up or across to F{FLOORS[target]}"
    return None


def violations(root: Path) -> list[str]:
    """Return one line `path:line: import: why` for each import that breaks a rule."""
    found = cycles(root)
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        own = own_package(path, root)
        if own and own not in FLOORS:
            found.append(f"{name}:1: megatron/{own} has no floor; known: {', '.join(FLOORS)}")
        elif not name.startswith("tests/"):  # tests may import what they like
            found += [
                f"{name}:{each.line}: {each.module}: {why}"
                for each in imports(path, root)
                if (why := broken_rule(own, each) or broken_shelf(module, each))
            ]
    return found


def test_the_engine_holds_only_what_training_needs(repo_root):
    files = sources(repo_root / "megatron" / "engine")
    assert len(files) <= MOST_ENGINE_FILES, len(files)


def test_the_house_keeps_its_rules(repo_root):
    checked = {own_package(path, repo_root) for path in sources(repo_root)}
    assert {"config", "data", "positional", "attention", "model", "engine", None} <= checked
    found = violations(repo_root)
    assert not found, "\n" + "\n".join(found)


BROKEN = [
    ("megatron/data/a.py", "import megatron.engine.open_text", "megatron/data (F1) reaches up"),
    ("megatron/data/a.py", "from megatron import positional", "reaches up or across to F1"),
    ("megatron/data/a.py", "from ..positional import load", "reaches up or across to F1"),
    ("megatron/model/a.py", "def f():\n    from megatron.engine import open_text", "to F4"),
    ("megatron/engine/job/a.py", "from megatron.plan import step", "reaches up or across to F5"),
    ("megatron/hub/a.py", "import megatron.evaluation.losses", "reaches up or across to F5"),
    ("megatron/evaluation/a.py", "import deepspeed", "only megatron/engine and megatron/plan"),
    ("megatron/attention/a/b.py", "from ...model.gpt import GPT", "reaches up or across to F3"),
    ("megatron/model/a.py", "def f():\n    import deepspeed", "only megatron/engine"),
    ("tools/a.py", "from deepspeed.ops import x", "only megatron/engine"),
    ("train.py", "import deepspeed", "only megatron/engine"),
    ("megatron/data/a.py", "from pydantic import BaseModel", "pydantic belongs"),
    ("megatron/config/a.py", "import torch.nn as nn", "without torch"),
    ("megatron/positional/a.py", "import triton", "only megatron/kernels"),
    ("megatron/attention/a.py", "try:\n    import triton\nfinally:\n    pass", "megatron/kernels"),
    ("megatron/engine/a.py", "from matplotlib import pyplot", "inside the function"),
    ("megatron/engine/a.py", "class A:\n    import wandb", "inside the function"),
    ("megatron/parallel/a.py", "def f():\n    import megatron.config", "never sees"),
    ("megatron/model/a.py", "from megatron.config import Config", "takes values"),
    ("megatron/a.py", "from megatron.config import Config", "below all floors"),
    ("megatron/a.py", "def f():\n    from megatron.engine import job", "below all floors"),
    ("megatron/helpers/a.py", "", "has no floor"),
    ("megatron/data/shards/a.py", "import megatron.data.samples.b", "data/shards reaches up"),
    ("megatron/data/samples/a.py", "from megatron.data.prepare import b", "reaches up or across"),
    ("megatron/data/errors.py", "import megatron.data.shards", "data/errors reaches up"),
    ("megatron/data/other/a.py", "import megatron.data.errors", "data/other has no shelf"),
    (
        "megatron/engine/open_text.py",
        "def f():\n    import megatron.engine.checkpoint",
        "reaches up or across",
    ),
    (
        "megatron/engine/open_text.py",
        "from megatron.engine import other",
        "engine/other has no shelf",
    ),
]
ALLOWED = [
    ("megatron/plan/a.py", "from deepspeed.runtime.pipe import schedule"),
    ("megatron/engine/a.py", "import deepspeed\nfrom megatron.model import gpt\nimport pydantic"),
    ("megatron/kernels/a.py", "import triton.language as tl\nimport torch"),
    ("megatron/positional/a.py", "def f():\n    import triton"),
    ("megatron/data/shards/a.py", "from megatron.config import Config\nfrom . import mmap"),
    ("megatron/model/a.py", "if TYPE_CHECKING:\n    from megatron.config import Config"),
    ("megatron/engine/a.py", "def f():\n    import matplotlib, wandb"),
    ("train.py", "import pydantic\nfrom megatron.pretraining.run import train"),
    ("megatron/a.py", "from megatron import launcher"),
    ("tests/a.py", "import deepspeed\nimport wandb"),
    ("runs/a.py", "import deepspeed"),
    (".venv/lib/a.py", "import deepspeed"),
]


def make_tree(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("name, text, why", BROKEN)
def test_the_checker_sees_a_violation(tmp_path, name, text, why):
    make_tree(tmp_path, name, text)
    found = violations(tmp_path)
    assert len(found) == 1 and found[0].startswith(f"{name}:") and why in found[0]


def test_the_checker_sees_a_circle(tmp_path):
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megatron.model.c import C"
    make_tree(tmp_path, "megatron/model/a.py", "from megatron.model import b")
    make_tree(tmp_path, "megatron/model/b.py", lazy)
    make_tree(tmp_path, "megatron/model/c.py", "def f():\n    import megatron.model.a")
    make_tree(tmp_path, "megatron/model/d.py", "import megatron.model.a")
    make_tree(tmp_path, "megatron/model/e.py", "")
    assert violations(tmp_path) == [
        "import each other: megatron.model.a, megatron.model.b, megatron.model.c"
    ]


@pytest.mark.parametrize("name, text", ALLOWED)
def test_the_checker_lets_the_rest_be(tmp_path, name, text):
    make_tree(tmp_path, name, text)
    assert violations(tmp_path) == []
