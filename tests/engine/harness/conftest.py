"""Give a stored run and its model, and compute log-likelihoods one text at a time."""

from __future__ import annotations

import shutil

import pytest
import torch

from megatron.config import load_config
from megatron.data.tokenizers.build import build_tokenizer
from megatron.engine.checkpoint.load_weights import load_model
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
    return load_model(config, run, BYTES, build_groups(torch.device("cpu")))[0].double()


def log_probabilities(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]))[0].double().log_softmax(-1)


def log_likelihood(model, context, text):
    ids = [*context, *text]
    logs = log_probabilities(model, ids)
    return sum(logs[at - 1, ids[at]].item() for at in range(len(context), len(ids)))
