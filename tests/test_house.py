"""Test what new users rely on: README's two commands, CI, pins, links and examples."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import yaml

from megatron.version import __version__
from tests.helpers.paths import ROOT
from tests.helpers.sources import sources

TESTS = "pytest -q -n 3 --dist loadfile"
SETUP = (
    "python3 -m venv .venv && .venv/bin/pip install -q -e {} -c {} && PATH=$PWD/.venv/bin:$PATH "
)


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_readmes_first_two_code_blocks_are_the_two_commands(repo_root):
    text = (repo_root / "README.md").read_text().replace("&& \\\n  ", "&& ")
    first, second = code_blocks(text)[:2]
    train = (
        SETUP.format(".", "requirements.txt") + ".venv/bin/python train.py configs/quickstart.yml\n"
    )
    assert first == train
    tests = SETUP.format("'.[dev]'", "requirements-dev.txt")
    assert second == tests + ".venv/bin/python -m " + TESTS + "\n"


def test_ci_runs_readmes_test_command_in_an_environment_of_its_own(repo_root):
    script = repo_root / ".ci" / "run"
    assert script.stat().st_mode & 0o111 == 0o111
    text = script.read_text()
    command = code_blocks((repo_root / "README.md").read_text())[1].strip().rpartition("/")[2]
    assert command == "python -m " + TESTS
    assert f"\n{command} || status=$?\n" in text and text.rstrip().endswith('exit "$status"')
    assert "install -q --disable-pip-version-check -e '.[dev]' -c requirements-dev.txt\n" in text
    assert 'export PATH="$work/venv/bin:$PATH"' in text


def test_ci_asks_for_a_recent_python(repo_root, tmp_path):
    """`python3` may be older than 3.11 if `python3.11` exists; with neither, CI stops."""
    for name in ("python3", "python3.11"):
        (tmp_path / name).write_text("#!/bin/sh\n[ $1 = --version ] && echo Python 3.9.1; exit 1\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [repo_root / ".ci" / "run"], capture_output=True, text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 2 and "needs Python 3.11 or newer" in done.stderr
    assert "found Python 3.9.1" in done.stderr


REQUIREMENTS = [
    "requirements.txt",
    "requirements-optional.txt",
    "requirements-hub.txt",
    "requirements-docs.txt",
    "requirements-dev.txt",
]


@pytest.mark.parametrize("name", REQUIREMENTS)
def test_every_requirement_is_pinned_exactly(repo_root, name):
    lines = (repo_root / name).read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert len(wanted) >= 3
    for line in wanted:
        included = line.removeprefix("-r ") in REQUIREMENTS
        assert included or re.fullmatch(r"[\w-]+==\d+(\.\d+)+(; python_version .*)?", line)


PAGES = [str(path.relative_to(ROOT)) for path in sources(ROOT, suffix=".md")]


@pytest.mark.parametrize("name", PAGES)
def test_links_and_named_files_exist(repo_root, name):
    page = repo_root / name
    text = page.read_text()
    links = set(re.findall(r"\]\(([^)#]+)\)", text)) - {"..."}  # a call in code
    missing = [each for each in links if "://" not in each and not (page.parent / each).exists()]
    # Paths in backquotes that look like files of this tree: from its root, or inside a package.
    named = set(re.findall(r"`([a-z_.]+/[\w./-]*\.(?:py|yml|sbatch|md))`", text))
    made_up = {"megatron/positional/kerple_root.py"}
    packages = ("", "tools", "megatron", "megatron/config", "megatron/data", "megatron/engine")
    roots = [repo_root / package for package in packages]
    globs = [path.replace("NAME", "*") for path in named - made_up]
    missing += [path for path in globs if not any([*root.glob(path)] for root in roots)]
    assert not missing


def test_pages_that_code_and_configs_name_exist(repo_root):
    files = [path for kind in (".py", ".yml", ".sbatch") for path in sources(ROOT, suffix=kind)]
    named = {
        (path.name, page)
        for path in files
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text())
    }
    assert len(named) > 15
    missing = {each for each in named if not (repo_root / each[1]).exists()}
    assert missing <= {("test_house.py", "docs/NAME.md")}


def test_contributing_names_files_that_exist(repo_root):
    """NAME stands for the new one, so a file of this kind must exist."""
    text = (repo_root / "CONTRIBUTING.md").read_text()
    changes = text.partition("## The usual changes")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\*\*An? [\w ]+\.\*\* ", changes, re.MULTILINE)) == 10
    written = {"site/"}  # by mkdocs
    named = set(re.findall(r"`([\w./-]*(?:/|\w\.(?:py|md|yml|csv))[\w./-]*)[` ]", text)) - written
    assert len(named) > 30
    assert [each for each in named if not [*repo_root.glob(each.replace("NAME", "*"))]] == []


def test_architectures_example_embedding_works(repo_root):
    text = (repo_root / "ARCHITECTURE.md").read_text()
    source = textwrap.dedent(re.search(r"^ *```python\n(.*?)^ *```", text, re.M | re.S)[1])
    namespace = {"__name__": "megatron.positional.kerple_root"}
    exec(compile(source, "ARCHITECTURE.md", "exec"), namespace)
    embedding = namespace["KerpleRoot"]()
    assert embedding.name == "kerple_root"
    theta_HN = embedding.initial_theta(2, torch.Generator().manual_seed(0))
    bias_HS = embedding.bias(theta_HN, torch.tensor([0, 1, 4]))
    torch.testing.assert_close(bias_HS, -theta_HN * torch.tensor([0.0, 1.0, 2.0]))


def test_the_example_for_your_own_code_works(repo_root):
    text = (repo_root / "docs" / "own_code.md").read_text()
    source = re.search(r"^```python\n(.*?)^```", text, re.M | re.S)[1]
    namespace: dict = {}
    exec(compile(source, "docs/own_code.md", "exec"), namespace)
    assert namespace["out"].shape == namespace["q"].shape
    assert namespace["theta"].grad.abs().min() > 0


def test_the_files_that_run_first_exist(repo_root, request):
    conftest = request.config.pluginmanager.get_plugin(str(repo_root / "tests" / "conftest.py"))
    present = {path.stem for path in (repo_root / "tests").rglob("test_*.py")}
    assert set(conftest.SLOW_FILES) <= present


def test_gpu_tests_skip_without_cuda_and_say_what_runs_them(repo_root, tmp_path):
    text = "import pytest\n\n@pytest.mark.gpu\ndef test_it(): ...\n"
    (tmp_path / "test_one.py").write_text(text)
    (tmp_path / "conftest.py").write_text((repo_root / "tests" / "conftest.py").read_text())
    options = ["-p", "no:cacheprovider", "-rs", "-q", "-c", str(repo_root / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)],
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "1 skipped" in done.stdout, done.stdout + done.stderr
    assert "`python -m pytest -m gpu`" in done.stdout


ABSENT = ("deepspeed", "pydantic", "yaml", "hypothesis", "tokenizers", "matplotlib", "wandb")


def test_gpu_tests_are_collected_where_there_is_little_more_than_torch(repo_root, tmp_path):
    """On a bare GPU machine, tests that need the engine report the missing packages."""
    text = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n"
    (tmp_path / "sitecustomize.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "HOME": str(tmp_path),
             "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=repo_root, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    files = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    present = {f"tests/gpu/{path.name}" for path in (repo_root / "tests" / "gpu").glob("test_*.py")}
    engine = {"tests/gpu/test_gpu_engine.py", "tests/gpu/test_gpu_optimizers.py"}
    assert files == present - engine
    assert "needs requirements.txt (deepspeed" in done.stdout


def test_citation_and_changelog_have_the_version(repo_root):
    citation = yaml.safe_load((repo_root / "CITATION.cff").read_text())
    assert citation["version"] == __version__ and citation["license"] == "Apache-2.0"
    assert f"\n## {__version__} " in (repo_root / "CHANGELOG.md").read_text()


def test_the_licence_is_apache_2(repo_root: Path):
    text = (repo_root / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
