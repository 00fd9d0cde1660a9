"""Each recipe is what its source publishes, is whole, and keeps its batch on 8 and 64 GPUs."""

from __future__ import annotations

import pytest

from megatron.config import load_config
from tests.helpers.paths import CONFIGS

RECIPES = sorted(path.stem for path in (CONFIGS / "recipes").glob("*.yml"))

# Read from the sources that the recipes name. The batch is in tokens, the warm-up in steps.
PYTHIA = {
    "seq_length": 2048, "tokens a step": 2_097_152, "train_iters": 143_000, "betas": (0.9, 0.95),
    "eps": 1e-8, "decay_style": "cosine", "warm-up": 1430, "weight_decay": 0.1,
    "gradient_clipping": 1.0, "precision": "fp16", "pos_emb": "rotary", "rotary_pct": 0.25,
    "gpt_j_residual": True, "no_weight_tying": True, "hidden_dropout": 0, "attention_dropout": 0,
    "zero_stage": 1, "initial_scale_power": 12, "save_interval": 1000,
}  # fmt: skip
OWN = {
    "precision": "bf16", "pos_emb": "kerple_log", "rotary_pct": 1.0, "initial_scale_power": 16,
    "save_interval": 500,
}  # fmt: skip


def shape(layers: int, width: int, heads: int, lr: float, **others: object) -> dict[str, object]:
    names = ("num_layers", "hidden_size", "num_attention_heads", "lr", "min_lr")
    values = (layers, width, heads, lr, pytest.approx(lr / 10))
    return dict(zip(names, values, strict=True)) | others


PUBLISHED: dict[str, dict[str, object]] = {
    "pythia_160M": PYTHIA | shape(12, 768, 12, 6e-4, init_method="small_init"),
    "pythia_410M": PYTHIA | shape(24, 1024, 16, 3e-4, init_method="small_init"),
    "pythia_1.4B": PYTHIA | shape(24, 2048, 16, 2e-4, init_method="small_init"),
    "pythia_6.9B": PYTHIA | shape(32, 4096, 32, 1.2e-4, init_method="normal"),
    "gpt_neox_20B": PYTHIA
    | shape(44, 6144, 64, 0.97e-4, init_method="small_init")
    | {
        "tokens a step": 3_145_728, "train_iters": 150_000, "warm-up": 1500, "weight_decay": 0.01,
        "save_interval": 500, "pipe_parallel_size": 4, "model_parallel_size": 2,
        "split": "995,4,1",
    },
    "llama_7B": shape(32, 4096, 32, 3e-4)
    | {
        "seq_length": 2048, "tokens a step": 4_194_304, "train_iters": 238_419,
        "betas": (0.9, 0.95), "decay_style": "cosine", "warm-up": pytest.approx(2000, abs=0.5),
        "weight_decay": 0.1, "gradient_clipping": 1.0, "norm": "rmsnorm", "rms_norm_epsilon": 1e-6,
        "activation": "swiglu", "inner_width": 11008, "no_weight_tying": True, "precision": "bf16",
    },
    "kerple_162M": {
        "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 512,
        "tokens a step": 16_384, "train_iters": 50_000, "lr": 6e-4, "betas": (0.9, 0.999),
        "weight_decay": 0, "warm-up": 500, "precision": "bf16", "pos_emb": "kerple_log",
    },
    "own_160M": PYTHIA
    | OWN
    | shape(12, 768, 12, 6e-4)
    | {"tokens a step": 524_288, "train_iters": 6_200, "warm-up": 310},
    "own_1.4B": PYTHIA
    | OWN
    | shape(24, 2048, 16, 2e-4)
    | {"tokens a step": 1_048_576, "train_iters": 27_000, "warm-up": 540},
}  # fmt: skip


def load(name: str, processes: int = 8, *overrides: str):
    return load_config([CONFIGS / "recipes" / f"{name}.yml"], overrides, world_size=processes)


def values_of(config) -> dict[str, object]:
    flat = {name: value for _, each in config.sections() for name, value in each}
    flat["inner_width"] = config.model.inner_width
    flat["tokens a step"] = config.batch.train_batch_size * config.model.seq_length
    flat["warm-up"] = config.lr.warmup * config.lr.decay_iters
    return flat


def test_every_recipe_is_compared_with_its_source():
    assert sorted(PUBLISHED) == RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_it_has_the_published_values(name):
    found = values_of(load(name))
    assert {key: found[key] for key in PUBLISHED[name]} == PUBLISHED[name]
    assert found["decay_iters"] == found["train_iters"]


@pytest.mark.parametrize("name", RECIPES)
def test_one_line_changes_the_text_and_the_batch_is_that_of_any_cluster(name):
    here, *others = (load(name, ranks) for ranks in (8, 16, 32))
    if name != "kerple_162M":  # 32 sequences are not for 64 GPUs
        others.append(load(name, 64))
    for other in others:
        assert other.batch.train_batch_size == here.batch.train_batch_size
    text = (CONFIGS / "recipes" / f"{name}.yml").read_text()
    (line,) = [line for line in text.splitlines() if "# change this line" in line]
    assert line.startswith("data_path: ") and here.checkpoint.save == f"runs/{name}"
    assert load(name, 8, "data_path=data/x").data.data_path == "data/x"


@pytest.mark.parametrize("name", RECIPES)
def test_each_line_of_the_model_and_its_training_names_its_source(name):
    text = (CONFIGS / "recipes" / f"{name}.yml").read_text()
    body = text[text.index("\nnum_layers") : text.index("\nsave: ")].splitlines()
    assert [line for line in body if line and " # " not in line] == []
    named = {mark for line in body for mark in ("[F]", "[P]", "[W]", "[G]", "[C]") if mark in line}
    assert all(f"{mark} " in text[: text.index("\ndata_path")] for mark in named) and named
