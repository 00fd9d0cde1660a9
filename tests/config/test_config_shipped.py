"""Every YAML file under configs/ composes into a valid Config, and states only differences."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron import positional
from megatron.config import load_config
from megatron.config.choices import POSITIONAL_NAMES, positional_name
from megatron.config.describe import describe
from megatron.config.reader import read_file
from megatron.embedding_names import PUBLISHED_POSITIONAL_NAMES
from tests.helpers.paths import CONFIGS, FIXTURES, ROOT, SHIPPED

CONFIG_FIXTURES = FIXTURES / "config"
WHOLE = ("quickstart.yml", "tasks/", "recipes/")  # they need no other file
PAPER = ("model/small.yml", "paper/train.yml", "pos_emb/kerple_log.yml")


def compose(*names: str, world_size: int = 1):
    return load_config([CONFIGS / name for name in names], world_size=world_size)


@pytest.mark.parametrize("name", SHIPPED)
def test_it_composes(name: str) -> None:
    world_size = 8 if name == "recipes/gpt_neox_20B.yml" else 1
    base = () if name.startswith(WHOLE) else (*PAPER, "data/openwebtext2.yml", "cluster/cpu.yml")
    config = compose(*base, name, world_size=world_size)
    settings, _ = read_file(CONFIGS / name)
    origins = describe(config)
    for given in settings.values():  # everything the file states is in force
        assert given.value is None or str(given.mark) in origins


def test_there_is_a_file_for_each_part() -> None:
    folders = {name.split("/")[0] for name in SHIPPED if "/" in name}
    assert {"model", "pos_emb", "data", "cluster", "paper"} <= folders
    embeddings = {Path(name).stem for name in SHIPPED if name.startswith("pos_emb/")}
    assert embeddings <= set(POSITIONAL_NAMES)
    for name in embeddings:
        assert compose(*PAPER, f"pos_emb/{name}.yml").model.pos_emb == name


@pytest.mark.parametrize(
    "published", [*PUBLISHED_POSITIONAL_NAMES, "kerple_log", "kerple_power_original"]
)
def test_published_names_have_a_file(published: str) -> None:
    name = positional_name(published)
    assert name in POSITIONAL_NAMES
    assert (ROOT / "megatron" / "positional" / f"{name}.py").is_file()


def test_the_paper_files_are_the_published_hyperparameters(tmp_path: Path) -> None:
    ours = compose(*PAPER)
    overlay = tmp_path / "pos.yml"
    overlay.write_text("pos-emb: kerple_log")
    theirs = load_config([CONFIG_FIXTURES / "kerple_train.yml", overlay])
    for section in ("model", "batch", "optimizer", "lr", "training", "checkpoint"):
        assert getattr(ours, section) == getattr(theirs, section), section
    assert ours.data.split == theirs.data.split
    evaluation = compose(*PAPER, "paper/paper_eval.yml")
    assert evaluation.training.train_iters == 0
    assert (evaluation.training.eval_iters, evaluation.batch.train_batch_size) == (320, 1)


def test_eight_gpus_keep_the_global_batch() -> None:
    config = compose(*PAPER, "cluster/gpu8_zero1.yml", world_size=8)
    assert config.batch.train_batch_size == compose(*PAPER).batch.train_batch_size == 32
    assert config.batch.train_micro_batch_size_per_gpu == 4
    assert config.parallel.zero_stage == 1


def test_the_config_knows_the_embeddings_that_can_be_loaded():
    """Both lists leave out the files that define no embedding."""
    assert positional.names() == POSITIONAL_NAMES
