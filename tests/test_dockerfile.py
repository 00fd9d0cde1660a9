"""Test rules for the Dockerfile without Docker: pins, no root, no passwords, no downloads.

The last test shows that each rule can be broken and is then reported.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SECRET_NAME = re.compile(r"PASSW|SECRET|TOKEN|API_?KEY|CREDENTIAL", re.IGNORECASE)
UNWANTED = re.compile(r"\b(chpasswd|passwd|sudo|sshd|openssh-server|curl|wget)\b")


def instructions(text: str) -> list[tuple[str, str]]:
    """Return pairs (INSTRUCTION, arguments), without comments and with joined lines."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*(#|$)", line)]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    pairs = [line.strip().split(None, 1) for line in joined.splitlines()]
    return [(pair[0].upper(), pair[1]) for pair in pairs]


def pins(requirements: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)$", requirements, re.MULTILINE))


def pip_arguments(run: str) -> list[str]:
    """Return the packages that the pip install commands of one RUN install."""
    installs = re.findall(r"pip install ([^&;|]+)", run)
    words = " ".join(installs).replace("-r ", "-r=").replace("-e ", "-e=").split()
    return [word for word in words if not word.startswith("--")]


def broken_rules(text: str, requirements: str) -> list[str]:
    found = []
    steps = instructions(text)
    arguments = dict(steps)
    defaults = dict(value.split("=", 1) for name, value in steps if name == "ARG" and "=" in value)

    for name, value in steps:
        if name == "FROM" and not re.fullmatch(r"[\w./-]+:[\w.-]*\d[\w.-]*( AS \w+)?", value):
            found.append(f"FROM {value}: name a fixed version")
        if name == "ADD":
            found.append(f"ADD {value}: copy from the checkout instead")
        if name in ("ENV", "ARG") and SECRET_NAME.search(value):
            found.append(f"{name} {value}: no secret belongs in an image")
        if name == "RUN" and (unwanted := UNWANTED.search(value)):
            found.append(f"RUN ...: {unwanted[0]} has no place here")
        if name == "RUN" and "apt-get install" in value:
            lean = "--no-install-recommends" in value and "rm -rf /var/lib/apt/lists/*" in value
            if not lean or "apt-get update" not in value:
                found.append("apt-get: update, install --no-install-recommends, clean in one RUN")
        if name == "RUN":
            found += broken_pips(value, pins(requirements))

    user = arguments.get("USER", "root")
    user = defaults.get(user.strip("${}"), user)
    if user.split(":")[0] in ("root", "0"):
        found.append(f"USER {user}: must not be root")
    order = [name + " " + value for name, value in steps]
    source = next((i for i, step in enumerate(order) if re.match(r"COPY .*\. \.$", step)), None)
    ours = [i for i, step in enumerate(order) if "-e=." in pip_arguments(step)]
    last_pip = max(
        (i for i, step in enumerate(order) if "pip install" in step and i not in ours), default=-1
    )
    if source is not None and source < last_pip:
        found.append("COPY . .: packages come first, or each edit reinstalls them")
    if ours and (source is None or ours[0] < source):
        found.append("pip install -e .: the source must be copied first")
    return found


def broken_pips(run: str, pinned: dict[str, str]) -> list[str]:
    found = []
    for word in pip_arguments(run):
        package, _, version = word.partition("==")
        if word.startswith("-r="):
            continue
        if word == "-e=.":
            if "--no-deps" not in run:
                found.append("pip install -e .: --no-deps, the requirements are already there")
            continue
        if not version:
            found.append(f"pip install {word}: pin it with ==")
        elif pinned.get(package, version) != version:
            found.append(f"pip install {word}: requirements.txt has {pinned[package]}")
    if "pip install" in run and "--no-cache-dir" not in run:
        found.append("pip install: --no-cache-dir keeps the layer small")
    return found


@pytest.fixture(scope="module")
def requirements(repo_root: Path) -> str:
    return (repo_root / "requirements.txt").read_text()


def test_the_dockerfile_keeps_its_rules(repo_root, requirements):
    assert broken_rules((repo_root / "Dockerfile").read_text(), requirements) == []


def test_the_dockerfile_installs_torch_the_requirements_and_the_source(repo_root, requirements):
    steps = instructions((repo_root / "Dockerfile").read_text())
    installed = [word for name, value in steps if name == "RUN" for word in pip_arguments(value)]
    assert f"torch=={pins(requirements)['torch']}" in installed
    assert '-r="${REQUIREMENTS}"' in installed and installed[-1] == "-e=."
    assert ("ARG", "REQUIREMENTS=requirements.txt") in steps


def test_what_a_run_writes_and_secrets_stay_out_of_the_image(repo_root):
    ignored = (repo_root / ".dockerignore").read_text().split()
    assert {".git", ".venv", "data", "runs", "wandb", "**/.env", "**/.netrc"} <= set(ignored)


GOOD = """
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
RUN apt-get update && apt-get install -y --no-install-recommends g++ \\
    && rm -rf /var/lib/apt/lists/*
USER 1000
RUN pip install --no-cache-dir torch==2.13.0
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
RUN pip install --no-cache-dir --no-deps -e .
"""


@pytest.mark.parametrize(
    "old, new, why",
    [
        ("cuda:13.0.2-devel-ubuntu24.04", "cuda", "name a fixed version"),
        ("cuda:13.0.2-devel-ubuntu24.04", "cuda:latest", "name a fixed version"),
        ("USER 1000", "", "must not be root"),
        ("USER 1000", "ARG WHO=root\nUSER ${WHO}", "must not be root"),
        ("COPY . .", "COPY . .\nUSER root", "must not be root"),
        ("COPY . .", "COPY . .\nADD https://example.com/x /x", "copy from the checkout"),
        ("COPY . .", "COPY . .\nENV WANDB_API_KEY=abc", "no secret"),
        ("COPY . .", "COPY . .\nRUN echo root:x | chpasswd", "chpasswd has no place"),
        ("--no-install-recommends ", "", "--no-install-recommends"),
        ("torch==2.13.0", "torch==2.12.0", "requirements.txt has 2.13.0"),
        ("torch==2.13.0", "torch", "pin it"),
        ("--no-cache-dir torch", "torch", "--no-cache-dir"),
        ("USER 1000", "COPY . .\nUSER 1000", "packages come first"),
        ("--no-deps ", "", "--no-deps"),
        ("COPY . .\n", "", "the source must be copied first"),
    ],
)
def test_each_rule_sees_its_violation(requirements, old, new, why):
    assert broken_rules(GOOD, requirements) == []
    found = broken_rules(GOOD.replace(old, new, 1), requirements)
    assert len(found) == 1 and why in found[0]
