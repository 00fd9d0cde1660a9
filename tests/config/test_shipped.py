"""Which file a name of a config means, in the user's folder and among the shipped ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.config import load_config
from megatron.config.reader import read_file
from megatron.data.tokenizers.build import build_tokenizer
from megatron.shipped import find
from tests.helpers.paths import ROOT

CONFIGS = ROOT / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("name", "shipped"),
    [
        ("quickstart", "quickstart.yml"),
        ("quickstart.yml", "quickstart.yml"),
        ("configs/quickstart", "quickstart.yml"),
        ("recipes/own_160M", "recipes/own_160M.yml"),
        ("configs/quickstart_bpe.json", "quickstart_bpe.json"),
        (CONFIGS / "quickstart", "quickstart.yml"),
    ],
)
def test_a_name_without_a_file_here_is_a_shipped_config(name, shipped):
    assert find(name) == CONFIGS / shipped


@pytest.mark.parametrize("name", ["paper", "configs", "no.yml", "configs/no", "/etc/no", "a\0b"])
def test_other_names_stay_as_they_are(name):
    """`paper` is a folder of configs, and no file."""
    assert find(name) == Path(name)


def test_a_file_of_the_user_comes_first(tmp_path):
    (tmp_path / "quickstart.yml").write_text("train_iters: 3\n")
    assert find("quickstart") == Path("quickstart.yml")
    assert load_config([CONFIGS / "quickstart.yml", "quickstart"]).training.train_iters == 3
    (tmp_path / "quickstart").mkdir()
    assert find("quickstart") == Path("quickstart.yml")
    (tmp_path / "recipes").write_text("")
    assert find("recipes") == Path("recipes")


def test_configs_and_tokenizers_are_found_from_any_folder():
    config = load_config(["quickstart"])
    assert config.sources == (str(CONFIGS / "quickstart.yml"),)
    assert str(config.data.vocab_file) == "configs/quickstart_bpe.json", "as it was written"
    assert build_tokenizer(config.data.tokenizer_type, config.data.vocab_file).vocab_size == 1024


def test_a_misspelt_name_gets_the_nearest_shipped_one():
    [problem] = read_file("recipes/own_160m.yml")[1]
    assert "did you mean own_160M.yml? " in problem.text
