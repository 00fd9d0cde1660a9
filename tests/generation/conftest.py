"""Fixtures that run generate.py on a stored run."""

from __future__ import annotations

import shutil
import sys

import pytest
import yaml

import generate as command
from tests.helpers.paths import FIXTURES

WRITTEN = FIXTURES / "checkpoint"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the stored run's folder, with the `config.yml` that a run has."""
    return run_with(tmp_path_factory.mktemp("stored"), "run")


def run_with(folder, name, **changes):
    shutil.copytree(WRITTEN / name, folder / name)
    values = yaml.safe_load((WRITTEN / "config.yml").read_text()) | changes
    (folder / name / "config.yml").write_text(yaml.safe_dump(values))
    return folder / name


@pytest.fixture
def call(monkeypatch, capsysbinary):
    """Return a function that runs generate.py here, and returns stdout and stderr."""

    def run_here(*args, code=0):
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, args)])
        found = 0
        try:
            found = command.main()
        except SystemExit as end:
            found = end.code
        out, err = (text.decode() for text in capsysbinary.readouterr())
        assert found == code, err
        return out, err

    return run_here
