"""Files and overrides -> settings with the place each was written.

A source becomes `Settings`: a flat dict from key path to `Given`. Mappings are flattened, so
`optimizer: {params: {lr: 1e-3}}` is the one entry `("optimizer", "params", "lr")`; lists and empty
mappings are values. Keys lose the difference between `-` and `_`.

The text is YAML as GPT-NeoX writes it, which includes JSON with comments, trailing commas, tabs and
Python's True, False and None. Scalars are resolved here, because YAML 1.1 (PyYAML) reads `6e-4` as
text, `1:30` as 90, `010` as 8 and `2020-01-01` as a date; here they are a float, text, ten and
text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.config.errors import Mark, Problem

KeyPath = tuple[str, ...]

_INT = re.compile(r"[-+]?[0-9][0-9_]{0,30}")
_HEX = re.compile(r"0[xX][0-9a-fA-F]{1,30}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = {
    ".inf": float("inf"),
    "+.inf": float("inf"),
    "-.inf": -float("inf"),
    ".nan": float("nan"),
}
_NULL = {"", "~", "null", "Null", "NULL", "None"}
_BOOL = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{t}" for t in ("null", "bool", "int", "float", "str", "timestamp")
}
_MAX_NODES = 20_000  # YAML aliases let a small file expand to any size


@dataclass(frozen=True)
class Given:
    """A value and where it was written."""

    value: Any
    mark: Mark


Settings = dict[KeyPath, Given]


class _Unreadable(Exception):
    """A problem after which the rest of the source is not read."""

    def __init__(self, line: int, key: str, text: str) -> None:
        super().__init__(text)
        self.line, self.key, self.text = line, key, text


def dotted(path: Iterable[str]) -> str:
    """A key path as messages name it: `optimizer.params.lr`."""
    return ".".join(path)


def scalar(text: str) -> Any:
    """The value of an unquoted YAML scalar."""
    if text in _NULL:
        return None
    if text.lower() in _BOOL:
        return _BOOL[text.lower()]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _HEX.fullmatch(text):
        return int(text, 16)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return _SPECIAL.get(text.lower(), text)


class _Builder:
    """Turns one composed YAML document into settings; duplicate keys become problems."""

    def __init__(self, name: str, *, lines: bool) -> None:
        self.name, self.lines = name, lines
        self.settings: Settings = {}
        self.problems: list[Problem] = []
        self.nodes = 0

    def mark(self, line: int) -> Mark:
        return Mark(self.name, line if self.lines else None)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> None:
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise _Unreadable(line, dotted(path), "a key must be plain text; write key: value")
            if key_node.tag.endswith(":merge"):
                text = "YAML merge keys are not supported; give several files instead"
                raise _Unreadable(line, "<<", text)
            key = key_node.value.strip().replace("-", "_")
            here = (*path, key)
            if key in seen:
                text = f"given twice in this file, first on line {seen[key]}"
                text += " (- and _ are the same); keep one"
                self.problems.append(Problem(self.mark(line), dotted(here), text))
                continue
            seen[key] = line
            self._count(value_node, line, here)
            if isinstance(value_node, yaml.MappingNode) and value_node.value:
                self.mapping(value_node, here)
            else:
                self.settings[here] = Given(self.value(value_node, here), self.mark(line))

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        line = node.start_mark.line + 1
        self._count(node, line, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, path) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return {k.value: self.value(v, path) for k, v in node.value}
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _PLAIN_TAGS:
            text = f"the YAML tag {node.tag} is not supported; write a plain value"
            raise _Unreadable(line, dotted(path), text)
        return scalar(node.value) if node.style is None else node.value

    def _count(self, node: yaml.Node, line: int, path: KeyPath) -> None:
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            text = f"YAML aliases expand to more than {_MAX_NODES} values; write the value out"
            raise _Unreadable(line, dotted(path), text)


def _read(text: str, name: str, *, lines: bool) -> tuple[Settings, list[Problem]]:
    builder = _Builder(name, lines=lines)
    # YAML refuses tabs between tokens, but a JSON file may be indented with them.
    text = re.sub(r"^[ \t]+", lambda m: m.group().replace("\t", "    "), text, flags=re.MULTILINE)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None or (isinstance(root, yaml.ScalarNode) and root.value == ""):
            return {}, []
        if not isinstance(root, yaml.MappingNode):
            raise _Unreadable(1, "", "expected `key: value` lines or one {...} mapping")
        builder.mapping(root, ())
    except _Unreadable as error:
        builder.problems.append(Problem(builder.mark(error.line), error.key, error.text))
    except (yaml.YAMLError, RecursionError) as error:
        builder.problems.append(_syntax_problem(error, builder))
    return builder.settings, builder.problems


def _syntax_problem(error: Exception, builder: _Builder) -> Problem:
    place = Mark(builder.name)
    if isinstance(error, RecursionError):
        return Problem(place, "", "nested too deeply; write the value out")
    what = str(error).splitlines()[0]
    if isinstance(error, yaml.MarkedYAMLError):
        what = " ".join(filter(None, (error.context, error.problem)))
        if at := error.problem_mark or error.context_mark:
            place = builder.mark(at.line + 1)
    return Problem(place, "", f"not valid YAML: {what}; correct it")


def read_file(path: str | Path) -> tuple[Settings, list[Problem]]:
    """Settings of one file, and its problems (missing, not text, not YAML, duplicate keys)."""
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError):
            why = "not UTF-8 text; a configuration is a YAML file"
        elif isinstance(error, FileNotFoundError):
            why = "no such file; check the path"
        else:
            why = f"cannot be read ({error.strerror or error}); give a YAML file"
        return {}, [Problem(Mark(name), "", why)]
    return _read(text, name, lines=True)


def read_override(text: str) -> tuple[Settings, list[Problem]]:
    """Settings of one `key=value`; dots lead into mappings, the value is YAML."""
    name = f"-o {text}"
    key, equals, value = text.partition("=")
    path = tuple(part.strip().replace("-", "_") for part in key.split("."))
    if not equals or not all(path):
        return {}, [Problem(Mark(name), "", "not key=value; write e.g. -o train_iters=100")]
    settings, problems = _read("value: " + value, name, lines=False)
    if any(other[0] != "value" for other in settings):
        return {}, [Problem(Mark(name), dotted(path), "the value must be one line of YAML")]
    problems = [Problem(p.mark, dotted(path), p.text) for p in problems]
    return {(*path, *rest[1:]): given for rest, given in settings.items()}, problems


def merge(base: Settings, over: Settings) -> Settings:
    """`base` updated with `over`, recursively: nested mappings merge key by key.

    A plain value replaces the mapping at its key, and a mapping replaces a plain value. null
    removes a setting: it is then as if never given.
    """
    result = dict(base)
    for path, given in over.items():
        inside = [old for old in result if len(old) > len(path) and old[: len(path)] == path]
        if given.value == {} and inside:
            continue
        around = [path[:n] for n in range(1, len(path))]
        for old in [*inside, *around, path]:
            result.pop(old, None)
        result[path] = given
    return result
