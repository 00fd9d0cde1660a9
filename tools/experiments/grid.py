"""Read a grid file, a YAML file that describes many runs and the claims that the runs test.

    runs: runs/paper/table3-{model}            the folder that contains the run folders
    variables: {model: small}                  the value of {model}; `--set model=xl` changes it
    configs: [configs/model/{model}.yml, configs/pos_emb/{embedding}.yml]
    overrides: {eval_split: test}              keys that take precedence over the config files
    axes: {embedding: [kerple_log, rotary]}    each combination of values and seed is a cell (a run)
    seeds: [1235, 1236]
    lengths: [512, 1024]                       `eval_lengths` of each cell
    endpoints: {P1: {claim: below, of: {embedding: kerple_log, length: 1024}, than: ...}}

Instead of a list, an axis may be a mapping. The mapping contains, for the name of each value, the
`configs`, `overrides` and `seeds` of the runs with this value. `{NAME}` is replaced by the value of
the variable NAME, or by the cell's value on the axis NAME. docs/experiments.md describes all keys.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.config import Config, ConfigError, Problem, load_config
from megatron.config.errors import Mark
from megatron.config.reader import Settings, read_file
from megatron.shipped import find
from megatron.suggest import nearest
from tools.experiments.description import (
    BEST,
    COLUMNS,
    METRICS,
    OTHER_COLUMNS,
    Description,
    Endpoint,
    sides,
    values_of,
)

MOST_CELLS = 10_000
"""The most cells of a grid."""
_NAME = re.compile(r"[\w.+-]+")
_VARIABLE = re.compile(r"\{(\w+)\}")
_KINDS = {"list[str]", "dict[str,nullable[Value]]", "Endpoint", "list[Endpoint]"}

Fault = tuple[tuple[str | int, ...], str]


@dataclass(frozen=True)
class Cell:
    """One training run of a grid, with its config and its run folder.

    Attributes:
        name: The name of the cell: its values on the axes, and its seed, such as
            `github-kerple_log-1235`.
        axes: Maps each axis to the cell's value on it.
        seed: The seed of the run.
        configs: The paths of the config files.
        overrides: Texts `key=value`, which take precedence over the config files.
        folder: The run folder.
        processes: The number of processes that train the cell.
    """

    name: str
    axes: dict[str, str]
    seed: int
    configs: tuple[str, ...]
    overrides: tuple[str, ...]
    folder: Path
    processes: int

    def config(self) -> Config:
        """Load the cell's config, and return it.

        Raises:
            ConfigError: The config has problems.
        """
        return load_config(self.configs, self.overrides, world_size=self.processes)


@dataclass(frozen=True)
class Grid:
    """A set of training runs (cells) that a grid file describes.

    Attributes:
        path: The path of the grid file.
        about: The content of the grid file.
        variables: The values of the variables.
        runs: The folder that contains the run folders.
        cells: The training runs.
    """

    path: Path
    about: Description
    variables: dict[str, str]
    runs: Path
    cells: tuple[Cell, ...]

    @property
    def rows(self) -> str:
        """The axis whose values are the rows of the tables."""
        return self.about.rows or list(self.about.axes)[-1]


def read_grid(path: Path, given: Mapping[str, str] | None = None) -> Grid:
    """Read a grid file, which describes a set of training runs.

    The configs of the runs are not loaded.

    Args:
        path: The path of the grid file.
        given: Values that replace those of the file's `variables`.

    Raises:
        ConfigError: The file cannot be read, or does not describe a grid.
    """
    path = find(path)
    settings, problems = read_file(path)
    if problems:
        raise ConfigError(problems)
    try:
        about = Description.model_validate(_nested(settings))
    except ValidationError as error:
        # A value of the wrong kind gets an error for each kind that is allowed there. Faults inside
        # a value of the right kind say more.
        found = [(each["loc"], _why(each)) for each in error.errors()]
        inside = {loc[:n] for loc, _ in found if loc[-1] not in _KINDS for n in range(len(loc))}
        told = [(loc, why) for loc, why in found if loc[-1] not in _KINDS or loc[:-1] not in inside]
        faults = [(tuple(part for part in loc if part not in _KINDS), why) for loc, why in told]
        raise _error(path, settings, faults) from None
    variables = about.variables | dict(given or {})
    if faults := list(_faults(about, variables)):
        raise _error(path, settings, faults)
    runs = Path(filled(about.runs, variables))
    cells = tuple(itertools.islice(_cells(about, runs, variables), MOST_CELLS + 1))
    if len(cells) > MOST_CELLS:
        text = f"give more than {MOST_CELLS:,} cells (each combination of values and seeds is one)"
        raise _error(path, settings, [(("axes",), f"{text}; write smaller grids")])
    for name, count in Counter(cell.name for cell in cells).items():
        if count > 1:
            text = f"{count} cells are named {name}, and each needs a run folder of its own"
            raise _error(path, settings, [(("axes",), text)])
    return Grid(path, about, variables, runs, cells)


def filled(text: str, names: Mapping[str, str]) -> str:
    """Return `text` with each `{NAME}` replaced by its value in `names`."""
    return re.sub(_VARIABLE, lambda found: names[found[1]], text)


def _cells(about: Description, runs: Path, variables: Mapping[str, str]) -> Iterator[Cell]:
    axes = {axis: values_of(about, axis) for axis in about.axes}
    for names in itertools.product(*axes.values()):
        chosen = dict(zip(axes, names, strict=True))
        values = [axes[axis][name] for axis, name in chosen.items()]
        own = [value.seeds for value in values if value.seeds]
        for seed in own[-1] if own else about.seeds:
            name = "-".join([*names, str(seed)])
            folder = runs / name
            keys: dict[str, Any] = {
                "save": str(folder), "load": str(folder), "seed": seed,
                "eval_lengths": about.lengths,
            }  # fmt: skip
            for each in (about, *values):
                keys |= each.overrides
            known = {**variables, **chosen, "seed": str(seed)}
            parts = (path for each in (about, *values) for path in each.configs)
            configs = tuple(filled(part, known) for part in parts)
            overrides = tuple(f"{key}={yaml_line(value, known)}" for key, value in keys.items())
            yield Cell(name, chosen, seed, configs, overrides, folder, about.processes)


def yaml_line(value: Any, names: Mapping[str, str]) -> str:
    """Return a value as one line of YAML, with each `{NAME}` replaced by its value in `names`."""
    if isinstance(value, str) and re.search(_VARIABLE, value):
        return filled(value, names)  # without quotes: the value may be a number
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)}: {yaml_line(each, names)}" for key, each in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(yaml_line(each, names) for each in value) + "]"
    return json.dumps(value)


def _faults(about: Description, variables: Mapping[str, str]) -> Iterator[Fault]:
    """Yield (place, text) for each fault of a grid file that pydantic's type checks do not find.

    Args:
        about: The content of the grid file.
        variables: The values of the variables.
    """
    for name in variables.keys() - about.variables.keys():
        yield ("variables",), f"there is no {name}, which --set names; write its default here"
    known = {*about.variables, *about.axes, "seed"}
    for axis in about.axes:
        if axis in [*COLUMNS, *OTHER_COLUMNS]:
            yield ("axes", axis), f"{axis} is another column of the results; rename the axis"
        if not values_of(about, axis):
            yield ("axes", axis), "has no values"
        for name in values_of(about, axis):
            if not _NAME.fullmatch(name):
                text = f"{name!r} names folders; write letters, digits and . _ + -, with the value "
                yield ("axes", axis), text + "itself in `overrides`"
    parts = [value for axis in about.axes for value in values_of(about, axis).values()]
    texts = [about.paper.corpus] if about.paper else []
    for each in (about, *parts):
        texts += [*each.configs, json.dumps(each.overrides)]
        for key in each.overrides.keys() & {"save", "seed"}:
            yield ("overrides",), f"each cell has its own {key}; write `runs` and `seeds` instead"
    for name in set(re.findall(_VARIABLE, " ".join(texts))) - known:
        yield ("configs",), f"{{{name}}} is neither an axis nor under `variables`"
    texts = [about.runs, about.paper.table if about.paper else ""]
    texts += about.tokenizer.model_dump().values() if about.tokenizer else []
    for name in set(re.findall(_VARIABLE, " ".join(map(str, texts)))) - about.variables.keys():
        yield ("runs",), f"{{{name}}} is not under `variables`"
    for key, axis in (("rows", about.rows), ("compare", "")):
        if axis and axis not in about.axes:
            yield (key,), f"{axis} is no axis; known: {', '.join(about.axes)}"
    rows = about.rows or list(about.axes)[-1]
    if about.compare and rows in about.axes and about.compare not in values_of(about, rows):
        yield ("compare",), f"{about.compare} is no value of {rows}"
    for name, given in about.endpoints.items():
        for part in given if isinstance(given, list) else [given]:
            for text in _endpoint_faults(about, part):
                yield ("endpoints", name), text


def _endpoint_faults(about: Description, endpoint: Endpoint) -> Iterator[str]:
    allowed = {axis: [*values_of(about, axis)] for axis in about.axes}
    if endpoint.metric not in METRICS:
        yield f"metric {endpoint.metric} is unknown; known: {', '.join(METRICS)}"
    if endpoint.claim == "below" and endpoint.by >= 100:
        yield f"by: nothing is {endpoint.by:g}% below a positive number or a share"
    lengths = [*map(str, about.lengths)]
    one, other = sides(endpoint)
    if one == other:
        yield "than: is the same as `of`; name what differs"
    given = [(one, lengths), (other, [*lengths, BEST])]
    if endpoint.relative_to:
        given += [(side | endpoint.relative_to, lengths) for side in (one, other)]
        if one == one | endpoint.relative_to:
            yield "relative_to: is `of` itself; name what differs, e.g. the training length"
    for side, length in given:
        for key, known in (allowed | {"length": length}).items():
            if key not in side and len(known) > 1:
                yield f"of: names no {key}; known: {', '.join(known)}"
            elif key in side and side[key] not in known:
                yield f"{key}: {side[key]} is not in this grid; known: {', '.join(known)}"
        if unknown := side.keys() - allowed.keys() - {"length"}:
            yield f"{', '.join(unknown)}: no axis; known: {', '.join(allowed)}, length"


def _why(error: Mapping[str, Any]) -> str:
    """Return the message that explains `error`, one of pydantic's errors."""
    if error["type"] == "string_type":
        return f"{error['input']!r} is not a text; write it in quotes"
    if error["type"] != "extra_forbidden":
        return error["msg"]
    near = nearest(str(error["loc"][-1]), [*Description.model_fields, *Endpoint.model_fields])
    return "unknown key" + (f", did you mean {near}?" if near else "")


def _nested(settings: Settings) -> dict[str, Any]:
    """Return `settings` as nested mappings, like those in the grid file.

    Args:
        settings: Maps each key path, such as ("endpoints", "P1", "of"), to a value.
    """
    nested: dict[str, Any] = {}
    for (*outer, last), given in settings.items():
        inside = nested
        for key in outer:
            inside = inside.setdefault(key, {})
        inside[last] = given.value
    return nested


def _error(path: Path, settings: Settings, faults: Sequence[Fault]) -> ConfigError:
    """Return the error that reports each fault (place, text) with its line in the file."""

    def mark(place: tuple[str, ...]) -> Mark:
        for size in range(len(place), 0, -1):
            for keys, given in settings.items():
                if keys[:size] == place[:size]:
                    return given.mark
        return Mark(str(path))

    found = dict.fromkeys((tuple(map(str, place)), text) for place, text in faults)
    return ConfigError([Problem(mark(place), ".".join(place), text) for place, text in found])
