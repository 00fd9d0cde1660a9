"""Read config files and overrides into settings, each with the place where it was written.

Each source (a file or an override) is read into `Settings`, a flat dict from key path to `Given`.
For example, `optimizer: {params: {lr: 1e-3}}` becomes one entry with the key path
`("optimizer", "params", "lr")`. A list or an empty mapping is the value of one entry. In keys, `-`
is replaced by `_`.

The accepted text is YAML, as in GPT-NeoX's configs. It may also be JSON with comments, trailing
commas, tabs, and Python's True, False and None. PyYAML parses the structure of the text, but this
module's function `scalar` converts the unquoted values. PyYAML follows YAML 1.1 and would read
`6e-4` as text, `1:30` as 90, `010` as 8 and `2020-01-01` as a date. `scalar` reads `6e-4` as a
float, `010` as 10, and both `1:30` and `2020-01-01` as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
_SECRET = re.compile(r"(?<=://)[^/@\s]*@")
_MAX_BYTES = 2_000_000
_MAX_NODES = 20_000  # YAML aliases let a small file expand to any size


@dataclass(frozen=True)
class Given:
    """A value from a config file or override, and the place where the value was written.

    Attributes:
        value: The value, with YAML's types.
        mark: The place of the value.
        again: The line on which the same file repeats the key with the same value, or None.
    """

    value: Any
    mark: Mark
    again: int | None = field(default=None, compare=False)


Settings = dict[KeyPath, Given]


class _Unreadable(Exception):
    """The error for a problem that makes it impossible to read the rest of a file or override."""

    def __init__(self, line: int, key: str, text: str) -> None:
        super().__init__(text)
        self.line, self.key, self.text = line, key, text


def dotted(path: Iterable[str]) -> str:
    """Join a key path with dots, for example `optimizer.params.lr`."""
    return ".".join(path)


def scalar(text: str) -> Any:
    """Return the value of an unquoted YAML scalar: None, a bool, a number or text."""
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
    """Converts one YAML document into `settings`, and collects `problems` such as duplicate keys.

    Args:
        name: The path of the file, or the text of the override. Problems are reported under it.
        lines: Whether problems are also reported with their line. It is false for an override.
    """

    def __init__(self, name: str, *, lines: bool) -> None:
        self.name, self.lines = name, lines
        self.settings: Settings = {}
        self.problems: list[Problem] = []
        self.nodes = 0

    def mark(self, line: int) -> Mark:
        return Mark(self.name, line if self.lines else None)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> None:
        seen: dict[str, tuple[int, yaml.Node]] = {}
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
                self._repeated(here, line, value_node, *seen[key])
                continue
            seen[key] = line, value_node
            self._count(value_node, line, here)
            if isinstance(value_node, yaml.MappingNode) and value_node.value:
                self.mapping(value_node, here)
            else:
                self.settings[here] = Given(self.value(value_node, here), self.mark(line))

    def _repeated(
        self, path: KeyPath, line: int, node: yaml.Node, first_line: int, first: yaml.Node
    ) -> None:
        """Handle a key that occurs twice in one mapping.

        If both values are equal, record the second line in `Given.again`. Otherwise add a problem.
        """
        # The text of a value distinguishes 1 from true, which Python takes for equal.
        if repr(self.value(node, path)) == repr(self.value(first, path)):
            for inside in [each for each in self.settings if each[: len(path)] == path][:1]:
                self.settings[inside] = replace(self.settings[inside], again=line)
            return
        text = f"given twice in this file, first on line {first_line}, with another value"
        text += " (- and _ are the same); keep one"
        self.problems.append(Problem(self.mark(line), dotted(path), text))

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
        if problem := _unfit(node.value):
            raise _Unreadable(line, dotted(path), problem)
        return scalar(node.value) if node.style is None else node.value

    def _count(self, node: yaml.Node, line: int, path: KeyPath) -> None:
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            text = f"YAML aliases expand to more than {_MAX_NODES} values; write the value out"
            raise _Unreadable(line, dotted(path), text)


def _read(text: str, name: str, *, lines: bool) -> tuple[Settings, list[Problem]]:
    builder = _Builder(name, lines=lines)
    # JSON files may be indented with tabs, which YAML does not allow.
    text = re.sub(r"^[ \t]+", lambda m: m.group().replace("\t", "    "), text, flags=re.MULTILINE)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None or (isinstance(root, yaml.ScalarNode) and root.value == ""):
            return {}, []
        if not isinstance(root, yaml.MappingNode):
            raise _Unreadable(1, "", "expected `key: value` lines or one {...} mapping")
        builder.mapping(root, ())
    except (_Unreadable, yaml.YAMLError, RecursionError) as error:
        builder.problems.append(_problem_of(error, builder))
    return builder.settings, builder.problems


def _problem_of(error: Exception, builder: _Builder) -> Problem:
    if isinstance(error, _Unreadable):
        return Problem(builder.mark(error.line), error.key, error.text)
    place = Mark(builder.name)
    if isinstance(error, RecursionError):
        return Problem(place, "", "nested too deeply; write the value out")
    what = str(error).splitlines()[0]
    if isinstance(error, yaml.MarkedYAMLError):
        what = " ".join(filter(None, (error.context, error.problem)))
        if at := error.problem_mark or error.context_mark:
            place = builder.mark(at.line + 1)
    return Problem(place, "", f"not valid YAML: {what}; correct it")


def _unfit(text: str) -> str | None:
    """Return the reason why a configuration must not contain `text`, or None if it may.

    For example, `text` must not contain a password, because runs write their configuration to disk.
    """
    if _SECRET.search(text):
        return (
            "contains a user name or a password before @, and the configuration is written to "
            "disk; leave it out, and give it in an environment variable such as WANDB_API_KEY"
        )
    if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text):
        return "contains a character that no path and no text can have; remove it"
    return None


def read_file(path: str | Path) -> tuple[Settings, list[Problem]]:
    """Read one config file, and return its settings and its problems.

    Examples of problems are a missing file, invalid YAML and duplicate keys.
    """
    name = str(path)
    try:
        with Path(path).open("rb") as file:  # not always a file: `train.py <(COMMAND)` is a pipe
            content = file.read(_MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError):
            why = "not UTF-8 text; a configuration is a YAML file"
        elif isinstance(error, FileNotFoundError):
            why = "no such file; check the path"
        else:
            why = f"cannot be read ({error.strerror or error}); give a YAML file"
        return {}, [Problem(Mark(name), "", why)]
    if len(content) > _MAX_BYTES:
        why = f"more than {_MAX_BYTES:,} bytes; is it a configuration?"
        return {}, [Problem(Mark(name), "", why)]
    return _read(text, name, lines=True)


def read_override(text: str) -> tuple[Settings, list[Problem]]:
    """Read one override of the form `key=value`, and return its settings and its problems.

    The key may be dotted, as in `optimizer.params.lr`, and the value is parsed as YAML.
    """
    name = f"-o {_SECRET.sub('***@', text)}"
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
    """Return `base` updated with `over`. Nested mappings are merged key by key.

    A plain value in `over` replaces a mapping in `base`, and a mapping replaces a plain value. A
    null in `over` replaces any value. `load_config` treats null as if the key were not given.
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
