"""Read the ranges of versions in pyproject.toml and the pins of the requirements files."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def ranges(root: Path) -> dict[str, dict[str, Requirement]]:
    """Return group -> package -> its range in pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    parsed = {group: [Requirement(line) for line in lines[group]] for group in lines}
    return {
        group: {normal(each.name): each for each in found if each.name != project["name"]}
        for group, found in parsed.items()
    }


def pins(path: Path, *, included: bool = False) -> dict[str, str]:
    """Return package -> version of a requirements file; with `included`, of its `-r` files, too."""
    found = {}
    for line in path.read_text().splitlines():
        if included and line.startswith("-r "):
            found |= pins(path.with_name(line[3:]), included=True)
        elif "==" in line:
            name, version = line.partition(";")[0].split("==")
            found[normal(name)] = version
    return found


def bounds(requirement: Requirement) -> dict[str, Version]:
    """Return the operators of a range -> their versions."""
    return {each.operator: Version(each.version) for each in requirement.specifier}
