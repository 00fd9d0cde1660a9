"""Test the package as pip installs it: its files, and with megatron-core beside it.

Offline: the wheel is built with the installed hatchling, and a wheel with the layout of
megatron-core (`megatron/core/__init__.py`, no `megatron/__init__.py`) is written here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

OURS, CORE = "kerple-neox", "megatron-core"


@pytest.fixture(scope="module")
def wheel(repo_root, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder, repo_root]
    pip(*build)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def core_wheel(tmp_path_factory) -> Path:
    """Build a wheel with the layout of megatron-core."""
    path = tmp_path_factory.mktemp("core") / "megatron_core-0.0.1-py3-none-any.whl"
    info = "megatron_core-0.0.1.dist-info"
    files = {
        "megatron/core/__init__.py": "__version__ = '0.0.1'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {CORE}\nVersion: 0.0.1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [*files, f"{info}/RECORD"]
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in record)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def pip(*arguments: object) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *map(str, arguments)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


class Environment:
    """A virtual environment that sees torch and its dependencies, but not this checkout."""

    def __init__(self, folder: Path):
        self.folder, self.python = folder, folder / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)

    def install(self, wheel: Path) -> None:
        pip("--python", self.python, "install", "--no-deps", "--no-index", wheel)

    def uninstall(self, name: str) -> None:
        pip("--python", self.python, "uninstall", "-y", name)

    def imports(self, statement: str) -> bool:
        """Return whether the statement runs. Any error but a missing module fails the test."""
        done = subprocess.run(
            [self.python, "-c", statement],
            cwd=self.folder, env=os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0 or "ModuleNotFoundError" in done.stderr, done.stderr
        return done.returncode == 0


def test_both_work_together_and_either_alone(wheel, core_wheel, tmp_path):
    environment = Environment(tmp_path)
    core, attend, ours = (
        "import megatron.core",
        "from megatron.attention import attend",
        "import megatron.version",
    )
    environment.install(wheel)
    environment.install(core_wheel)
    assert environment.imports(f"{core}; {attend}")
    environment.uninstall(OURS)
    assert environment.imports(core) and not environment.imports(ours)
    environment.install(wheel)
    environment.uninstall(CORE)
    assert environment.imports(ours) and not environment.imports(core)


def test_the_wheel_holds_the_package_and_nothing_else(repo_root, wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    tree = {
        path.relative_to(repo_root).as_posix()
        for path in (repo_root / "megatron").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert packed == tree
    assert "megatron/__init__.py" not in packed, "megatron is a namespace, shared with others"
    assert "megatron/py.typed" in packed, "type checkers read the hints only beside it"
    assert {"megatron/data/shards/__init__.py", "megatron/pretraining/run.py"} <= packed


def test_the_wheel_needs_what_requirements_txt_pins(repo_root, wheel):
    lines = (repo_root / "requirements.txt").read_text().splitlines()
    wanted = [Requirement(line) for line in lines if line and not line.startswith("#")]
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    required = [line.partition(": ")[2] for line in text.splitlines() if "Requires-Dist: " in line]
    needed = {r.name: r for line in required if not (r := Requirement(line)).marker}
    assert needed.keys() == {pin.name.replace("_", "-") for pin in wanted}
    for pin in wanted:
        [version] = pin.specifier
        assert version.operator == "=="
        assert needed[pin.name.replace("_", "-")].specifier.contains(version.version)
    for name in ("pytest", "ftfy"):  # of requirements-dev.txt and what it includes
        assert any(line.startswith(name) and "'dev'" in line for line in required)
    assert "Requires-Python: >=3.11" in text
