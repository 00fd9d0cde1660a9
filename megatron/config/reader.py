"""Read config files and overrides into settings, each with the place where it was written.

Each source (a file or an override) is read into `Settings`, a flat dict from key path to `Given`.
For example, `optimizer: {params: {lr: 1e-3}}` becomes one entry with the key path
`("optimizer", "params", "lr")`. A list or an empty mapping is the value of one entry. In keys, `-`
is replaced by `_`.

The accepted text is YAML, as in GPT-NeoX's configs. The text may also be JSON with comments,
trailing commas, tabs, and Python's True, False and None. PyYAML parses the structure of the text,
but this module's function `scalar` converts the unquoted values. PyYAML follows YAML 1.1 and would
read `6e-4` as text, `1:30` as 90, `010` as 8 and `2020-01-01` as a date. `scalar` reads `6e-4` as a
float, `010` as 10, and both `1:30` and `2020-01-01` as text.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from megatron.config.errors import ConfigError, Mark, Problem
from megatron.files import without_waiting
from megatron.shipped import shipped
from megatron.suggest import did_you_mean

KeyPath = tuple[str, ...]

_INT = re.compile(r"[-+]?[0-9][0-9_]{0,30}")
_HEX = re.compile(r"0[xX][0-9a-fA-F]{1,30}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_NULL = {"", "~", "null", "Null", "NULL", "None"}
# Maps unquoted words to their values. Case does not matter, except for the words of `_NULL`.
_WORDS = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **{sign + ".inf": float(sign + "inf") for sign in ("", "+", "-")},
    ".nan": float("nan"),
}
_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{t}" for t in ("null", "bool", "int", "float", "str", "timestamp")
}
_SECRET = re.compile(r"(?<=://)[^/@\s]*@")
_MAX_BYTES = 2_000_000
_MAX_NODES = 20_000  # YAML aliases let a small file expand to any size


@dataclass(frozen=True)
class Given:
    """A value from a config file or override, and the place where the value is written.

    Attributes:
        value: The value, as a Python object.
        mark: The place where the value is written.
        again: The line of the same file that repeats the key with the same value, or None.
    """

    value: Any
    mark: Mark
    again: int | None = field(default=None, compare=False)


Settings = dict[KeyPath, Given]


def dotted(path: Iterable[str]) -> str:
    """Join the keys of a key path with dots, for example to `optimizer.params.lr`."""
    return ".".join(path)


def scalar(text: str) -> Any:
    """Return the value of an unquoted YAML scalar: None, a bool, a number or text."""
    if text in _NULL:
        return None
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _HEX.fullmatch(text):
        return int(text, 16)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


class _Document:
    """A YAML document, its settings, and its problems, such as duplicate keys.

    Args:
        name: The path of the file, or the text of the override. Error messages contain it.
        text: The document's text.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.settings: Settings = {}
        self.problems: list[Problem] = []
        self.nodes = 0
        self.first: dict[KeyPath, tuple[int, yaml.Node]] = {}
        self.groups: set[KeyPath] = set()
        # JSON files may be indented with tabs, which YAML does not allow.
        text = re.sub(r"(?m)^[ \t]+", lambda m: m.group().replace("\t", "    "), text)
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            if isinstance(root, yaml.MappingNode):
                self._read(root, ())
            elif root is not None and root.value != "":
                raise self._error(1, (), "expected `key: value` lines or one {...} mapping")
        except ConfigError as error:
            self.problems += error.problems
        except RecursionError:
            self.problems.append(Problem(Mark(name), "", "nested too deeply; write the value out"))
        except yaml.YAMLError as error:
            mark, what = Mark(name), str(error).splitlines()[0]
            if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
                mark = Mark(name, error.problem_mark.line + 1)
                what = " ".join(filter(None, (error.context, error.problem)))
            self.problems.append(Problem(mark, "", f"not valid YAML: {what}; correct it"))

    def _error(self, line: int, path: KeyPath, text: str) -> ConfigError:
        """Return the error for a problem after which the rest of the document cannot be read.

        Args:
            line: The line of the error.
            path: The key path of the error.
            text: The error message.
        """
        return ConfigError([Problem(Mark(self.name, line), dotted(path), text)])

    def _read(self, node: yaml.MappingNode, path: KeyPath) -> None:
        """Add the settings in the mapping `node` to the document's settings.

        Args:
            node: The mapping.
            path: The key path of the mapping.
        """
        for key, line, value in self._entries(node, path):
            here = (*path, key) if path else tuple(key.split("."))
            if here in self.first:
                self._repeated(here, line, value, *self.first[here])
                continue
            self.first[here] = line, value
            outer = {here[:n] for n in range(1, len(here))}
            if isinstance(value, yaml.MappingNode) and value.value:
                self._read(value, here)
            elif here in self.groups or outer & self.settings.keys():
                text = "given in this file both as one value and as a mapping; keep one"
                self.problems.append(Problem(Mark(self.name, line), dotted(here), text))
            else:
                self.groups |= outer
                self.settings[here] = Given(self._value(value, here), Mark(self.name, line))

    def _entries(
        self, node: yaml.MappingNode, path: KeyPath
    ) -> Iterator[tuple[str, int, yaml.Node]]:
        """Yield the entries of the mapping `node` as (key, line, value).

        Args:
            node: The mapping.
            path: The key path of the mapping, for error messages.
        """
        self._count(node, path)
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(line, path, "a key must be plain text; write key: value")
            if key.tag.endswith(":merge"):
                text = "YAML merge keys are not supported; give several files instead"
                raise self._error(line, ("<<",), text)
            yield key.value.strip().replace("-", "_"), line, value

    def _repeated(
        self, path: KeyPath, line: int, node: yaml.Node, first_line: int, first: yaml.Node
    ) -> None:
        """Handle a key that occurs twice in one mapping.

        If both values are equal, the second line is recorded in `Given.again`. Otherwise a problem
        is added.

        Args:
            path: The key path of the key.
            line, node: The line and the value of the second occurrence.
            first_line, first: The line and the value of the first occurrence.
        """
        # The text of a value distinguishes 1 from true, which Python takes for equal.
        if repr(self._value(node, path)) == repr(self._value(first, path)):
            inside = next(each for each in self.settings if each[: len(path)] == path)
            self.settings[inside] = replace(self.settings[inside], again=line)
            return
        text = f"given twice in this file, first on line {first_line}, with another value"
        text += " (- and _ are the same); keep one"
        self.problems.append(Problem(Mark(self.name, line), dotted(path), text))

    def _value(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return the value of the YAML node `node` as a Python object."""
        if isinstance(node, yaml.MappingNode):
            return {key: self._value(value, path) for key, _, value in self._entries(node, path)}
        self._count(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, path) for item in node.value]
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _PLAIN_TAGS:
            text = f"the YAML tag {node.tag} is not supported; write a plain value"
            raise self._error(line, path, text)
        if problem := _unfit(node.value):
            raise self._error(line, path, problem)
        return node.value if node.style else scalar(node.value)

    def _count(self, node: yaml.Node, path: KeyPath) -> None:
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            text = f"YAML aliases expand to more than {_MAX_NODES} values; write the value out"
            raise self._error(node.start_mark.line + 1, path, text)


def _unfit(text: str) -> str | None:
    """Return the reason why a config must not contain `text`, or None if it may contain it."""
    # For example, `text` must not contain a password, because runs write their configuration to
    # disk.
    if _SECRET.search(text):
        return (
            "contains a user name or a password before @, and the configuration is written to "
            "disk; leave it out, and give it in an environment variable such as WANDB_API_KEY"
        )
    if re.search("[\0\ud800-\udfff]", text):
        return "contains a character that no path and no text can have; remove it"
    return None


def read_file(path: str | Path) -> tuple[Settings, list[Problem]]:
    """Read one config file, and return its settings and its problems.

    Examples of problems are a missing file, invalid YAML and duplicate keys.
    """
    try:
        # Not always a regular file: `train.py <(COMMAND)` is a pipe, which has a writer.
        with open(path, "rb", opener=without_waiting) as file:
            content = file.read(_MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        folders = (Path(path).parent, shipped(path).parent)
        names = (each.name for folder in folders for each in folder.glob("*.yml"))
        near = did_you_mean(Path(path).name, names)
        here = "" if Path(path).is_absolute() else f"the current folder is {Path.cwd()}; "
        why = f"no such file; {near}{here}check the path"
    except OSError as error:
        why = f"cannot be read ({error.strerror or error}); give a YAML file"
    except UnicodeDecodeError:
        why = "not UTF-8 text; a configuration is a YAML file"
    else:
        if len(content) <= _MAX_BYTES:
            document = _Document(str(path), text)
            return document.settings, document.problems
        why = f"more than {_MAX_BYTES:,} bytes; is it a configuration?"
    return {}, [Problem(Mark(str(path)), "", why)]


def read_override(text: str) -> tuple[Settings, list[Problem]]:
    """Read one override of the form `key=value`, and return its settings and its problems.

    The key may be dotted, as in `optimizer.params.lr`. The value is parsed as YAML.
    """
    mark = Mark(f"-o {_SECRET.sub('***@', text)}")
    key, equals, value = text.partition("=")
    path = tuple(part.strip().replace("-", "_") for part in key.split("."))
    if not equals or not all(path):
        return {}, [Problem(mark, "", "not key=value; write e.g. -o train_iters=100")]
    if " #" in f" {value}" and value.strip()[:1] not in ("'", '"', "[", "{"):
        return {}, [Problem(mark, dotted(path), "' #' begins a comment; write quotes around it")]
    document = _Document(mark.file, "value: " + value)
    if any(other[0] != "value" for other in document.settings):
        return {}, [Problem(mark, dotted(path), "the value must be one line of YAML")]
    settings = {
        (*path, *rest[1:]): replace(given, mark=mark) for rest, given in document.settings.items()
    }
    return settings, [Problem(mark, dotted(path), each.text) for each in document.problems]


def merge(base: Settings, over: Settings) -> Settings:
    """Merge two collections of settings: return `base` updated with `over`.

    Nested mappings are merged key by key.
    """
    # A plain value in `over` replaces a mapping in `base`, and a mapping replaces a plain value. A
    # null in `over` replaces any value.
    result = dict(base)
    for path, given in over.items():
        # The settings of which one contains the other.
        related = [old for old in result if old[: len(path)] == path[: len(old)]]
        if given.value == {} and any(len(old) > len(path) for old in related):
            continue
        for old in related:
            del result[old]
        result[path] = given
    return result
