"""Test what serves strangers who join: `make`, hooks, hosted workflow, forms, update bot."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.helpers.sources import sources

README_TESTS = "python -m pytest -q -n 3 --dist loadfile"
TOOLS = {"ruff", "codespell", "basedpyright", "mkdocs"}


def load(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


@pytest.fixture(scope="module")
def targets(repo_root) -> dict[str, list[str]]:
    """Return the commands of each target of the Makefile, with its variables filled in."""
    text = (repo_root / "Makefile").read_text()
    for name, value in re.findall(r"^(\w+) = (.*)$", text, re.MULTILINE):
        text = text.replace(f"$({name})", value)
    rules = re.findall(r"^(\w+):.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    return {name: [line.strip() for line in body.splitlines()] for name, body in rules}


@pytest.fixture(scope="module")
def pinned(repo_root) -> set[str]:
    text = "".join(path.read_text() for path in repo_root.glob("requirements*.txt"))
    return set(re.findall(r"^([\w-]+)==", text, re.MULTILINE))


def test_make_runs_pinned_tools_on_files_that_exist(repo_root, targets, pinned):
    usual = {"help", "check", "fast", "test", "docs", "format"}
    assert set(targets) == usual | {"processor", "oldest"}
    for command in [line for name in targets if name != "help" for line in targets[name]]:
        program, *words = command.split()
        assert program in {"python", ".ci/oldest"} | (TOOLS & pinned)
        named = [word for word in [program, *words] if "/" in word]
        assert all((repo_root / word).exists() for word in named), command


def test_make_runs_all_tests_as_readme_does(repo_root, targets):
    assert targets["test"] == [README_TESTS]
    assert f".venv/bin/{README_TESTS}\n" in (repo_root / "README.md").read_text()
    assert targets["fast"][0].startswith(README_TESTS + " tests/")


def test_make_check_includes_the_hooks_and_every_file_of_rules(repo_root, targets, pinned):
    [local] = load(repo_root / ".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local" and "pre-commit" in pinned
    for hook in local["hooks"]:
        # The environment's own tools: no second place pins their versions.
        assert hook["language"] == "system" and hook["entry"].split()[0] in pinned
        assert any(re.sub(" --check| \\.", "", each) == hook["entry"] for each in targets["check"])
    rules = {
        f"tests/{path.name}"
        for path in (repo_root / "tests").glob("test_*.py")
        if re.search(r"def test_the_(tree|text|house)_keeps_(the|its)_rule", path.read_text())
    }
    assert len(rules) == 3 and rules <= set(targets["check"][-1].split())


def test_every_make_target_that_a_page_names_exists(repo_root, targets):
    pages = [*sources(repo_root, suffix=".md"), *(repo_root / ".github").rglob("*.*")]
    named = {
        (path.name, target)
        for path in pages
        for target in re.findall(r"(?:^|`|run: )make (\w+)", path.read_text(), re.MULTILINE)
    }
    assert {page for page, _ in named} >= {"CONTRIBUTING.md", "ci.yml", "pull_request_template.md"}
    assert {target for _, target in named} <= set(targets)


def test_the_hosted_workflow_runs_the_projects_own_commands(repo_root, targets):
    workflow = load(repo_root / ".github/workflows/ci.yml")
    commands = {
        name: [step["run"] for step in job["steps"] if "run" in step]
        for name, job in workflow["jobs"].items()
    }
    install = "python -m pip install -e '.[dev]' -c requirements-dev.txt"
    assert commands == {
        "fast": [install, "make check", "make fast"],
        "all": [".ci/run"],
        "oldest": [".ci/oldest"],
        "processor": [install, "make processor"],
        "transformers4": [install, ".ci/transformers4"],
    }
    later = [job for name, job in workflow["jobs"].items() if name != "fast"]
    assert all(job["needs"] == "fast" for job in later)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True


def test_the_hosted_workflow_pins_its_actions_and_python(repo_root):
    workflow = load(repo_root / ".github/workflows/ci.yml")
    oldest = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]["requires-python"]
    for job in workflow["jobs"].values():
        assert re.fullmatch(r"ubuntu-\d+\.\d+", job["runs-on"]) and job["timeout-minutes"] <= 90
        checkout, python = [step for step in job["steps"] if "uses" in step]
        assert re.fullmatch(r"actions/checkout@(v\d+|[0-9a-f]{40})", checkout["uses"])
        assert checkout["with"] == {"persist-credentials": False}
        assert re.fullmatch(r"actions/setup-python@(v\d+|[0-9a-f]{40})", python["uses"])
        assert f">={python['with']['python-version']}" == oldest
        assert python["with"]["cache"] == "pip"
        assert list(repo_root.glob(python["with"]["cache-dependency-path"]))


FORMS = ("bug", "feature", "question")
FIELDS = {
    "markdown": {"value"},
    "input": {"label", "description"},
    "textarea": {"label", "description", "render"},
    "checkboxes": {"label", "options"},
}
"""The kinds of fields that the forms use -> their attributes."""


@pytest.mark.parametrize("name", FORMS)
def test_an_issue_form_is_valid(repo_root, name):
    form = load(repo_root / f".github/ISSUE_TEMPLATE/{name}.yml")
    assert set(form) == {"name", "description", "labels", "body"}
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    assert len({each["id"] for each in fields}) == len(fields) > 1
    assert any(each.get("validations") == {"required": True} for each in fields)
    for each in form["body"]:
        assert set(each) <= {"type", "id", "attributes", "validations"}
        present, allowed = set(each["attributes"]), FIELDS[each["type"]]
        assert allowed & {"value", "label", "options"} <= present <= allowed


def test_every_issue_has_a_form(repo_root):
    folder = repo_root / ".github/ISSUE_TEMPLATE"
    assert {path.stem for path in folder.iterdir()} == {*FORMS, "config"}
    assert load(folder / "config.yml") == {"blank_issues_enabled": False}


def test_files_that_the_templates_name_exist(repo_root):
    texts = [path.read_text() for path in (repo_root / ".github").rglob("*.*") if path.is_file()]
    named = set(re.findall(r"[\w./]*\w\.(?:md|py)\b", "\n".join(texts)))
    assert {"CONTRIBUTING.md", "SECURITY.md", "tools/doctor.py"} <= named
    assert [path for path in named if not (repo_root / path).is_file()] == []


def test_the_update_bot_watches_what_is_pinned(repo_root):
    config = load(repo_root / ".github/dependabot.yml")
    assert config["version"] == 2
    ecosystems = {each["package-ecosystem"]: each for each in config["updates"]}
    assert set(ecosystems) == {"pip", "github-actions", "docker"}
    assert (repo_root / "Dockerfile").is_file()
    for each in ecosystems.values():
        assert each["directory"] == "/" and each["schedule"]["interval"] == "monthly"
        assert [group["patterns"] for group in each["groups"].values()] == [["*"]]
