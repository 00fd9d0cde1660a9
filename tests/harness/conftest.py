"""Give a stored run and its model, call commands, and compute log-likelihoods of single texts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from megatron.config import load_config
from megatron.data.tokenizers.build import build_tokenizer
from megatron.engine.open_run import open_run
from megatron.parallel.groups import build_groups
from tests.helpers.paths import FIXTURES

BYTES = build_tokenizer("ByteLevelTokenizer")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the stored run's folder, with the `config.yml` that a run has."""
    folder = tmp_path_factory.mktemp("stored") / "run"
    shutil.copytree(FIXTURES / "checkpoint" / "run", folder)
    shutil.copy(FIXTURES / "checkpoint" / "config.yml", folder)
    return folder


@pytest.fixture(scope="module")
def model(run):
    """Return the stored model in float64."""
    config = load_config([run / "config.yml"])
    return open_run(run, config, build_groups(torch.device("cpu"))).model.double()


def log_probabilities(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]))[0].double().log_softmax(-1)


def log_likelihood(model, context, text):
    ids = [*context, *text]
    logs = log_probabilities(model, ids)
    return sum(logs[at - 1, ids[at]].item() for at in range(len(context), len(ids)))


@pytest.fixture
def call(monkeypatch, capsys):
    """Return a function that runs a command here, and returns stdout and stderr."""

    def run_here(module, *args, code=0):
        monkeypatch.setattr(sys, "argv", [Path(module.__file__).name, *map(str, args)])
        monkeypatch.setenv("HF_UPDATE_DOWNLOAD_COUNTS", "0")
        found = 0
        try:
            found = module.main()
        except SystemExit as end:
            found = end.code
        out, err = capsys.readouterr()
        assert found == code, err
        return out, err

    return run_here
