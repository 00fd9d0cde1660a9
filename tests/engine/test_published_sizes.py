"""Count the parameters of the ready configurations on the meta device, as they are published."""

import pytest
import torch

from megatron.config import load_config
from megatron.engine.build import plan_of
from megatron.model import GPT
from tests.helpers.paths import ROOT

TRAINING = ["paper/train.yml", "cluster/cpu.yml"]

# Parameters in all, and beside the embeddings: github.com/EleutherAI/pythia and the models' pages
PYTHIA = {
    ("14M", 128): (14_067_712, 1_189_888),
    ("31M", 128): (30_494_720, 4_739_072),
    ("19M", 128): (70_426_624, 18_915_328),
    ("small", 128): (162_322_944, 85_056_000),
    ("medium", 128): (405_334_016, 302_311_424),
    ("800M", 128): (1_011_781_632, 805_736_448),
    ("xl", 128): (1_414_647_808, 1_208_602_624),
    ("2-7B", 128): (2_775_208_960, 2_517_652_480),
    ("6-7B", 256): (6_857_302_016, 6_444_163_072),
    ("12B", 512): (11_846_072_320, 11_327_027_200),
    ("20B", 256): (20_554_567_680, 19_934_859_264),  # GPT-NeoX-20B, model card
}
# The name of the size in gpt-neox and in GPT-3 (2005.14165, table 2.1), whose embeddings are tied.
GPT3 = {
    "small": 125e6,
    "medium": 350e6,
    "large": 760e6,
    "xl": 1.3e9,
    "2-7B": 2.7e9,
    "6-7B": 6.7e9,
    "13B": 13e9,
    "175B": 175e9,
}
BESIDE_EMBEDDINGS = {"19M": 19e6, "49M": 49e6, "800M": 800e6}  # named so by gpt-neox
LLAMA = {  # parameters of the models' published weights
    "7B": 6_738_415_616,
    "13B": 13_015_864_320,
    "30B": 32_528_943_616,
    "65B": 65_285_660_672,
    "70B": 68_976_648_192,  # LLaMA 2
    "mistral-7B": 7_241_732_096,
}


def count(vocabulary, *files, **overrides):
    """Return (all parameters, those beside embeddings)."""
    changes = [f"{key}={value}" for key, value in overrides.items()]
    config = load_config([ROOT / "configs" / file for file in files], changes)
    with torch.device("meta"):
        model = GPT(plan_of(config, vocabulary, device_type="cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    embeddings = ("embedding.", "output.")
    return sum(sizes.values()), sum(n for k, n in sizes.items() if not k.startswith(embeddings))


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
