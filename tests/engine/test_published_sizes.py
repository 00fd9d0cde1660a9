"""Count the parameters of the ready configurations on the meta device, as they are published."""

import pytest

from megatron.config import load_config
from tests.helpers.paths import ROOT
from tests.model.published_sizes import BESIDE_EMBEDDINGS, GPT3, PYTHIA, parameters

TRAINING = ["paper/train.yml", "cluster/cpu.yml"]

LLAMA = {  # parameters of the models' published weights
    "7B": 6_738_415_616,
    "13B": 13_015_864_320,
    "30B": 32_528_943_616,
    "65B": 65_285_660_672,
    "70B": 68_976_648_192,  # LLaMA 2
    "mistral-7B": 7_241_732_096,
}


def count(vocabulary, *files, **overrides):
    """Return (all parameters, those beside embeddings) of the files with the overrides."""
    changes = [f"{key}={value}" for key, value in overrides.items()]
    config = load_config([ROOT / "configs" / file for file in files], changes)
    return parameters(config, vocabulary)


@pytest.mark.parametrize(("size", "divisible_by"), PYTHIA)
def test_pythia(size, divisible_by):
    files = (f"model/{size}.yml", *TRAINING, "family/pythia.yml")
    found = count(50257, *files, make_vocab_size_divisible_by=divisible_by)
    assert found == PYTHIA[size, divisible_by]


RECIPES = {  # vocabulary, parameters
    "pythia_160M": (50257, PYTHIA["small", 128][0]),
    "pythia_410M": (50257, PYTHIA["medium", 128][0]),
    "pythia_1.4B": (50257, PYTHIA["xl", 128][0]),
    "pythia_6.9B": (50257, PYTHIA["6-7B", 256][0]),
    "gpt_neox_20B": (50257, PYTHIA["20B", 256][0]),
    "llama_7B": (32_000, LLAMA["7B"]),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name):
    vocabulary, parameters = RECIPES[name]
    one = {"model_parallel_size": 1, "pipe_parallel_size": 1}
    assert count(vocabulary, f"recipes/{name}.yml", **one)[0] == parameters


@pytest.mark.parametrize("size", [*GPT3, *BESIDE_EMBEDDINGS])
def test_gpt_neox(size):
    files = (f"model/{size}.yml", *TRAINING, "family/neox.yml")
    tied = {"no_weight_tying": "false", "pos_emb": "learned"} if size in GPT3 else {}
    total, beside = count(50257, *files, **tied)
    published, found = (GPT3[size], total) if size in GPT3 else (BESIDE_EMBEDDINGS[size], beside)
    assert found == pytest.approx(published, rel=0.025)


@pytest.mark.parametrize("size", LLAMA)
def test_llama(size):
    total, _ = count(32_000, *TRAINING, "family/llama.yml", f"llama/{size}.yml")
    assert total == LLAMA[size]
