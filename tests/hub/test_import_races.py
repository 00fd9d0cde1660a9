"""Imports of different models into one folder at once: one succeeds, and no model is mixed."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

from megatron.config import load_config
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.job import lease
from megatron.hub.importing import import_folder
from megatron.parallel.groups import build_groups
from tests.helpers.hub import hub_model

KINDS = ("gpt_neox", "llama")
ROUNDS = 4
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        hub_model(kind).save_pretrained(folder / kind)
    return folder


def imported(source, target, ready, ends):
    lease.HEARTBEAT = 0.1
    torch.set_num_threads(1)
    ready.wait()
    try:
        import_folder(source, target)
        ends.put((source.name, ""))
    except Exception as error:
        ends.put((source.name, f"{type(error).__name__}: {error}"))


def test_of_two_imports_into_one_folder_one_succeeds(models, tmp_path):
    for number in range(ROUNDS):
        ready, ends, target = FORK.Barrier(4), FORK.SimpleQueue(), tmp_path / f"run{number}"
        jobs = [FORK.Process(target=imported, args=(models / kind, target, ready, ends))
                for kind in KINDS * 2]  # fmt: skip
        for job in jobs:
            job.start()
        found = [ends.get() for _ in jobs]
        for job in jobs:
            job.join()
        (won,) = (kind for kind, error in found if not error)
        errors = [error for _, error in found if error]
        assert all("is in use by" in each or "is not empty" in each for each in errors), errors
        saved = newest(target)
        assert saved and saved.damage(build_groups(torch.device("cpu"))) is None
        config = load_config([target / "config.yml"])
        assert (config.model.norm == "rmsnorm") == (won == "llama")
        assert saved.record.config["norm"] == config.model.norm
        assert ("final_norm.scale" in saved.weights()) == (won == "llama")
    assert len(list(tmp_path.iterdir())) == ROUNDS
