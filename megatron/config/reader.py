"""Files and overrides -> settings with the place each was written.

A source becomes ``Settings``: a flat dict from key path to :class:`Given`. Mappings are flattened,
so ``optimizer: {params: {lr: 1e-3}}`` is the one entry ``("optimizer", "params", "lr")``; lists and
empty mappings are values. Keys lose the difference between ``-`` and ``_``.

The text is YAML as GPT-NeoX writes it, which includes JSON with comments, trailing commas, tabs and
Python's True, False and None. Scalars are resolved here, because YAML 1.1 (PyYAML) reads ``6e-4``
as text, ``1:30`` as 90, ``010`` as 8 and ``2020-01-01`` as a date; here they are a float, text, ten
and text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.config.errors import Mark, Problem

Path_ = tuple[str, ...]

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
_MAX_NODES = 20_000  # aliases can make a small file unfold to any size


@dataclass(frozen=True)
class Given:
    """A value and where it was written."""

    value: Any
    mark: Mark


Settings = dict[Path_, Given]


class _Broken(Exception):
    """A problem that ends the reading of one source."""

    def __init__(self, line: int, key: str, text: str) -> None:
        super().__init__(text)
        self.line, self.key, self.text = line, key, text


def dotted(path: Iterable[str]) -> str:
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
    """Turns one composed YAML document into settings, noting duplicate keys as it goes."""

    def __init__(self, name: str, *, lines: bool) -> None:
        self.name, self.lines = name, lines
        self.settings: Settings = {}
        self.problems: list[Problem] = []
        self.nodes = 0

    def mark(self, line: int) -> Mark:
        return Mark(self.name, line if self.lines else None)

    def mapping(self, node: yaml.MappingNode, path: Path_) -> None:
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise _Broken(line, dotted(path), "a key must be plain text")
            if key_node.tag.endswith(":merge"):
                raise _Broken(line, "<<", "merge keys are not read; give several files instead")
            key = key_node.value.strip().replace("-", "_")
            here = (*path, key)
            if key in seen:
                self.problems.append(
                    Problem(
                        self.mark(line),
                        dotted(here),
                        f"given twice in this file, first on line {seen[key]} "
                        "(- and _ are the same); keep one",
                    )
                )
                continue
            seen[key] = line
            self._count(value_node, line, here)
            if isinstance(value_node, yaml.MappingNode) and value_node.value:
                self.mapping(value_node, here)
            else:
                self.settings[here] = Given(self.value(value_node, here), self.mark(line))

    def value(self, node: yaml.Node, path: Path_) -> Any:
        line = node.start_mark.line + 1
        self._count(node, line, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, path) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return {k.value: self.value(v, path) for k, v in node.value}
        if node.tag not in _PLAIN_TAGS:
            raise _Broken(
                line, dotted(path), f"the tag {node.tag} is not read; write a plain value"
            )
        return scalar(node.value) if node.style is None else node.value

    def _count(self, node: yaml.Node, line: int, path: Path_) -> None:
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            raise _Broken(line, dotted(path), "aliases unfold without end; write the value out")


def _read(text: str, name: str, *, lines: bool) -> tuple[Settings, list[Problem]]:
    builder = _Builder(name, lines=lines)
    # YAML refuses tabs between tokens; a JSON file may well be indented with them.
    text = re.sub(r"^[ \t]+", lambda m: m.group().replace("\t", "    "), text, flags=re.MULTILINE)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None or (isinstance(root, yaml.ScalarNode) and root.value == ""):
            return {}, []
        if not isinstance(root, yaml.MappingNode):
            raise _Broken(1, "", "expected `key: value` lines or one {...} mapping")
        builder.mapping(root, ())
    except _Broken as error:
        builder.problems.append(Problem(builder.mark(error.line), error.key, error.text))
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        what = " ".join(filter(None, (error.context, error.problem)))
        place = builder.mark(at.line + 1) if at else Mark(name)
        builder.problems.append(Problem(place, "", f"not valid YAML: {what}; correct this line"))
    except yaml.YAMLError as error:
        what = str(error).splitlines()[0]
        builder.problems.append(Problem(Mark(name), "", f"not valid YAML: {what}"))
    except RecursionError:
        builder.problems.append(Problem(Mark(name), "", "nested without end; write the value out"))
    return builder.settings, builder.problems


def read_file(path: str | Path) -> tuple[Settings, list[Problem]]:
    """Settings of one file, and what is wrong with it (missing, not text, not YAML, duplicates)."""
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return {}, [Problem(Mark(name), "", "no such file; check the path")]
    except UnicodeDecodeError:
        return {}, [Problem(Mark(name), "", "not UTF-8 text; a configuration is a YAML file")]
    except OSError as error:
        reason = error.strerror or error
        return {}, [Problem(Mark(name), "", f"cannot be read ({reason}); give a YAML file")]
    return _read(text, name, lines=True)


def read_override(text: str) -> tuple[Settings, list[Problem]]:
    """Settings of one ``key=value``; dots go into mappings, the value is YAML."""
    name = f"-o {text}"
    key, equals, value = text.partition("=")
    path = tuple(part.strip().replace("-", "_") for part in key.split("."))
    if not equals or not all(path):
        return {}, [Problem(Mark(name), "", "not key=value; write e.g. -o train_iters=100")]
    settings, problems = _read("value: " + value, name, lines=False)
    if any(other[0] != "value" for other in settings):
        return {}, [Problem(Mark(name), dotted(path), "a value must be one line of YAML")]
    problems = [Problem(p.mark, dotted(path), p.text) for p in problems]
    return {(*path, *rest[1:]): given for rest, given in settings.items()}, problems


def merge(base: Settings, over: Settings) -> Settings:
    """``over`` laid on ``base``: a recursive dict update, so nested mappings merge key by key.

    A plain value replaces the whole mapping that stood at its key, and the other way round; null
    takes a setting away (it is then as if never given).
    """
    result = dict(base)
    for path, given in over.items():
        beneath = [old for old in result if len(old) > len(path) and old[: len(path)] == path]
        if given.value == {} and beneath:
            continue
        above = [path[:n] for n in range(1, len(path))]
        for old in [*beneath, *above]:
            result.pop(old, None)
        result.pop(path, None)
        result[path] = given
    return result
