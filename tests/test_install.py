"""Test the package as pip installs it: its files, its commands, and with megatron-core beside it.

Offline: the wheel is built with the installed hatchling, and a wheel with the layout of
megatron-core (`megatron/core/__init__.py`, no `megatron/__init__.py`) is written here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.helpers.sources import COMMANDS

ONLY_IN_A_CHECKOUT = ("tools/check_parity.py", "tools/gpu_trial.py")
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


def pip(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *map(str, arguments)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Environment:
    """A virtual environment that sees torch and its dependencies, but not this checkout.

    Its folder `others` has a link to each installed package but this project.
    """

    def __init__(self, folder: Path):
        self.folder, self.python = folder, folder / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.others = folder / "others"
        self.others.mkdir()
        for each in Path(sysconfig.get_path("purelib")).iterdir():
            if "kerple" not in each.name and each.suffix != ".pth":
                (self.others / each.name).symlink_to(each)
        [packages] = (folder / "venv" / "lib").glob("*/site-packages")
        (packages / "others.pth").write_text(f"{self.others}\n")

    def install(self, wheel: Path) -> None:
        pip("--python", self.python, "install", "--no-deps", "--no-index", wheel)

    def uninstall(self, name: str) -> None:
        pip("--python", self.python, "uninstall", "-y", name)

    def imports(self, statement: str) -> bool:
        """Return whether the statement runs. Any error but a missing module fails the test."""
        done = subprocess.run(
            [self.python, "-c", statement],
            cwd=self.folder, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0 or "ModuleNotFoundError" in done.stderr, done.stderr
        return done.returncode == 0

    def kerple(self, *arguments: object) -> str:
        """Return what a command prints. It runs in a folder outside the checkout."""
        done = subprocess.run(
            [self.folder / "venv" / "bin" / "kerple", *map(str, arguments)], timeout=240,
            cwd=self.folder, capture_output=True, text=True, env=os.environ | {"WORLD_SIZE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("installed"))
    environment.install(wheel)
    return environment


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
    beside = {"pyproject.toml", "requirements.txt", "requirements-dev.txt", *COMMANDS}
    tree = {
        path.relative_to(repo_root).as_posix()
        for folder in ("megatron", "configs", "tools")
        for path in (repo_root / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    tree = {name for name in tree if not name.startswith(ONLY_IN_A_CHECKOUT)} | beside
    assert packed == {name if name.startswith("megatron/") else f"kerple/{name}" for name in tree}
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
    needed = {
        r.name: r
        for line in required
        if not (r := Requirement(line)).marker or "extra" not in str(r.marker)
    }
    assert needed.keys() == {pin.name.replace("_", "-") for pin in wanted}
    for pin in wanted:
        [version] = pin.specifier
        assert version.operator == "=="
        assert needed[pin.name.replace("_", "-")].specifier.contains(version.version)
    for name in ("pytest", "ftfy"):  # of requirements-dev.txt and what it includes
        assert any(line.startswith(name) and "'dev'" in line for line in required)
    assert "Requires-Python: >=3.11" in text


NAMES = ("train", "evaluate", "generate", "prepare", "doctor", "sweep", "table")
NAMES += ("export-hf", "import-hf", "lm-eval")
TINY = """{num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 16, eval_iters: 1,
data_path: data/mine_text_document, split: '8,1,1', train_iters: 2, save: runs/a, load: null,
eval_lengths: [16], eval_tokens: 32, eval_context_baseline: 0, log_interval: 1}"""


@pytest.mark.parametrize("name", NAMES)
def test_every_command_shows_its_help(installed, name):
    assert installed.kerple(name, "--help").startswith("usage: ")


def test_kerple_lists_its_commands(installed):
    listed = installed.kerple("--help").split()
    assert {*NAMES} <= {*listed}
    assert "check-parity" not in listed
    place = Path(installed.kerple("path").strip())
    assert (place / "configs/recipes/own_160M.yml").is_file()
    assert (place / "tools/slurm/train.sbatch").is_file()


def test_the_doctor_knows_the_versions_of_an_installation(installed):
    command = [installed.folder / "venv" / "bin" / "kerple", "doctor", "--json"]
    done = subprocess.run(command, cwd=installed.folder, capture_output=True, text=True)
    found = [row["text"] for row in json.loads(done.stdout) if row["check"] == "packages"]
    assert [text.split()[0] for text in found[:2]] == ["torch", "deepspeed"], done.stdout
    assert not [text for text in found if "FileNotFoundError" in text]


def test_shipped_configs_prepare_and_train_outside_the_checkout(installed):
    """A name, a whole path, a grid and a tokenizer's file mean shipped files."""
    folder = installed.folder
    by_name, by_path = (
        installed.kerple("train", name, "--check")
        for name in ("quickstart", "configs/quickstart.yml")
    )
    assert by_name == by_path and "site-packages/kerple/configs/quickstart.yml" in by_name
    assert "90 cells" in installed.kerple("sweep", "configs/paper/table3.yml", "--list")
    rows = [json.dumps({"text": f"a text of some words {i}" * 9}) for i in range(10)]
    (folder / "texts.jsonl").write_text("\n".join(rows))
    (folder / "tiny.yml").write_text(TINY)
    tokenizer = ("-t", "HFTokenizer", "-v", "configs/quickstart_bpe.json")
    given = ("--input", "texts.jsonl", "--name", "mine", "-d", "data", "--workers", "1")
    installed.kerple("prepare", *given, *tokenizer)
    installed.kerple("train", "quickstart", "tiny")
    steps = [
        json.loads(line) for line in (folder / "runs/a/metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in steps if "train/loss" in row] == [1, 2]
    assert (folder / "runs/a/extrapolation.csv").is_file()


def test_the_environments_own_torch_is_left_alone(wheel, tmp_path):
    """A build with a version of its own, as in a container of a vendor, satisfies the range."""
    environment = Environment(tmp_path)
    [torch] = environment.others.glob("torch-*.dist-info")
    torch.unlink()
    own = environment.others / "torch-2.12.0a0+own.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0a0+own\n")
    (own / "RECORD").write_text("")
    asked = ["install", "--dry-run", "--no-index", "--report", "-", wheel]
    report = json.loads(pip("--python", environment.python, *asked))
    assert [each["metadata"]["name"] for each in report["install"]] == [OURS]
