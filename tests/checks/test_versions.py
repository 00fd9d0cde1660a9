"""Test the versions: a range and a pin for each package, and pins in every install command.

The last tests also start what the Makefile runs as another processor, and the script of the oldest
packages, both as far as their settings go.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from tests.checks.versions import bounds, normal, pins, ranges
from tests.helpers.sources import sources

GROUPS = {
    "dependencies": "requirements.txt",
    "optional": "requirements-optional.txt",
    "hub": "requirements-hub.txt",
    "docs": "requirements-docs.txt",
    "dev": "requirements-dev.txt",
}
"""Each group of packages in pyproject.toml -> the file that pins them."""

INSTALL = re.compile(r"pip\"? install ([^`\n&|;#]*[^`\n&|;#\s])")
FOREIGN = {"-v --no-build-isolation", "apex"}
"""How the commands begin that install nothing of this project: NVIDIA's apex."""


def loose(command: str, root: Path) -> str:
    """Say what `pip install COMMAND` takes without a pinned version; "" if all is pinned."""
    words = shlex.split(command.replace("${REQUIREMENTS}", "requirements.txt"))
    options = dict(zip(words, words[1:], strict=False))
    every = pins(root / "requirements-dev.txt", included=True)
    if "-e" in words and "--no-deps" not in words:
        if "-c" not in options:
            return "-e without -c FILE"
        pinned, groups = pins(root / options["-c"], included=True), ranges(root)
        extras = re.findall(r"\w+", options["-e"])
        extras += ["optional", "hub", "docs"] if "dev" in extras else []
        needed = {name for group in ["dependencies", *extras] for name in groups[group]}
        return " ".join(sorted(needed - pinned.keys()))
    given = {options.get(option) for option in ("-e", "-c", "-r", "--python")}
    for word in words:
        name, _, version = word.partition("==")
        named = not word.startswith("-") and word not in given
        if named and (not version or every.get(normal(name), version) != version):
            return word
    return ""


def test_each_group_pins_the_packages_of_its_range(repo_root):
    found = ranges(repo_root)
    assert found.keys() == GROUPS.keys()
    for group, name in GROUPS.items():
        pinned = pins(repo_root / name)
        assert found[group].keys() == pinned.keys(), name
        for package, version in pinned.items():
            limits = bounds(found[group][package])
            assert limits.keys() == {">=", "<"}, f"{package}: a range with both ends"
            assert limits[">="] <= Version(version) < limits["<"], package
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    assert "kerple-neox[optional,hub,docs]" in project["optional-dependencies"]["dev"]


def test_ranges_hold_the_versions_that_the_project_promises(repo_root):
    found = ranges(repo_root)
    for group, package, versions in (
        ("dependencies", "torch", ("2.11.0", "2.12.0", "2.13.0")),
        ("dev", "triton", ("3.6.0", "3.7.1")),
    ):
        assert all(found[group][package].specifier.contains(v) for v in versions), package
    # Triton 3.6's interpreter needs an older numpy than the pin.
    assert found["dependencies"]["numpy"].specifier.contains("2.3.5")


def install_commands(root: Path) -> list[tuple[str, str]]:
    """Return pairs (file, what follows `pip install`) of all pages and scripts."""
    paths = [*sources(root, suffix=".md"), *(root / ".github").rglob("*.*ml")]
    paths += [root / name for name in ("Makefile", "Dockerfile", ".ci/run", ".ci/oldest")]
    paths += [root / name for name in GROUPS.values() if name.endswith(".txt")]
    return [
        (path.relative_to(root).as_posix(), command)
        for path in paths
        for command in INSTALL.findall(path.read_text().replace("\\\n", " "))
    ]


def test_every_install_command_takes_pinned_versions(repo_root):
    commands = install_commands(repo_root)
    places = {place for place, _ in commands}
    assert places >= {"README.md", "Dockerfile", ".ci/run", ".github/workflows/ci.yml"}
    assert places >= {"CONTRIBUTING.md", "docs/quickstart.md", "docs/gpu.md"}
    found = {
        f"{place}: {command}": loose(command, repo_root)
        for place, command in commands
        if not command.startswith(tuple(FOREIGN)) and place != ".ci/oldest"
    }
    assert {each: why for each, why in found.items() if why} == {}


@pytest.mark.parametrize(
    "command, why",
    [
        ("-e .", "-e without -c"),
        ("-q -e '.[dev]'", "-e without -c"),
        ("-e '.[dev]' -c requirements.txt", "accelerate basedpyright"),
        ("-e '.[hub]' -c requirements-hub.txt", "deepspeed"),
        ("-e '.[docs]' -c requirements.txt", "mkdocs"),
        ("torch", "torch"),
        ("torch==2.12.0", "torch==2.12.0"),
        ("-r requirements.txt pytest", "pytest"),
    ],
)
def test_a_command_without_pins_is_noticed(repo_root, command, why):
    assert why in loose(command, repo_root)


@pytest.mark.parametrize("command", ["-e . -c requirements.txt", "--no-deps -e .", "pip==26.3"])
def test_a_command_with_pins_passes(repo_root, command):
    assert loose(command, repo_root) == ""


def test_the_oldest_environment_has_every_lower_bound(repo_root):
    """Run the `sed` of `.ci/oldest`: its constraints are the lower bounds of all ranges."""
    script = (repo_root / ".ci" / "oldest").read_text()
    [derive] = re.findall(r"^(sed .*) >", script, re.MULTILINE)
    done = subprocess.run(["bash", "-c", derive], cwd=repo_root, capture_output=True, text=True)
    derived = dict(line.split("==") for line in done.stdout.splitlines())
    lowest = {n: bounds(r)[">="] for group in ranges(repo_root).values() for n, r in group.items()}
    assert {normal(name): Version(version) for name, version in derived.items()} == lowest
    assert "-e '.[dev]' -c \"$work/oldest.txt\"" in script and "make fast" in script
    assert lowest["torch"] == Version("2.11") and lowest["triton"] == Version("3.6")
    assert lowest["numpy"] < Version("2.4")


def test_the_script_of_the_oldest_environment_compiles_ten_kernels(repo_root):
    from tools import compile_kernels

    [chosen] = re.findall(r"--only '(.*)'", (repo_root / ".ci" / "oldest").read_text())
    variants = compile_kernels.variants()
    assert sum(bool(re.search(chosen, each.name)) for each in variants) == 10
    assert chosen.startswith("^sm_90 (kerple_log|")


def test_make_processor_reaches_the_tests_and_their_processes(repo_root):
    """The Makefile's settings hold in a process that a test starts: conftest.py keeps them."""
    text = (repo_root / "Makefile").read_text()
    settings = dict(re.findall(r"^processor: export (\w+) = (\w+)$", text, re.MULTILINE))
    assert settings.keys() == {
        *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"),
        *("OMP_NUM_THREADS", "MKL_DYNAMIC"),
    }
    child = """
import os, torch
print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), os.environ)
"""
    parent = f"""
import runpy, subprocess, sys
runpy.run_path("tests/conftest.py")
sys.exit(subprocess.run([sys.executable, "-c", {child!r}]).returncode)
"""
    done = subprocess.run(
        [sys.executable, "-c", parent],
        cwd=repo_root, env=os.environ | settings, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.startswith("DEFAULT 3 "), done.stdout + done.stderr
    for name in ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"):
        assert f"'{name}': 'AVX2'" in done.stdout
