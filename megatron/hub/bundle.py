"""Join the modules of an exported model into one file that imports only torch and transformers."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from megatron import positional
from megatron.templates import render

_PREFIX = "megatron."
_MODEL = tuple(f"megatron.hub.{name}" for name in ("layers", "backbone", "modeling_kerple"))


def bundle(terms: Iterable[str]) -> str:
    """Return the source of one Python file that defines the model and its positional embeddings.

    Args:
        terms: The names of the model's positional embeddings.
    """
    terms = sorted(set(terms))
    modules = {name: f"{positional.__name__}.{name}" for name in terms}
    order: list[str] = []
    for module in (*modules.values(), *_MODEL):
        _add(module, order)
    return render(
        Path(__file__).with_name("bundle.py.j2"),
        {"source": _source},
        embeddings=[module for module in order if module not in _MODEL],
        classes={name: type(positional.load(name)).__name__ for name in terms},
        model=_MODEL,
    )


def _add(module: str, order: list[str]) -> None:
    """Append to `order` the modules of this project that `module` imports, then `module` itself."""
    if module in (positional.__name__, *order):  # the template replaces that package's functions
        return
    for node in ast.walk(ast.parse(_text(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PREFIX):
            _add(str(node.module), order)
    order.append(module)


def _text(module: str) -> str:
    return inspect.getsource(import_module(module))


def _source(module: str) -> str:
    """Return the source of `module`, without the imports from this project and `__future__`."""
    text = _text(module)
    lines: list[str | None] = list(text.splitlines())
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (
            node.module == "__future__" or (node.module or "").startswith(_PREFIX)
        ):
            end = node.end_lineno or node.lineno
            lines[node.lineno - 1 : end] = [None] * (end - node.lineno + 1)
    kept = "\n".join(line for line in lines if line is not None)
    return f"# {'-' * 98}\n# {module}\n\n{kept.strip()}"
