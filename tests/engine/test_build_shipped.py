"""Test that every shipped YAML file describes a model that can be built."""

import pytest
import torch

from megatron.config import load_config
from megatron.config.schema import Config
from megatron.engine.build import plan_of
from megatron.engine.model_shape import shape_of
from megatron.kernels.compiled_variants import SWITCHES
from megatron.model import GPT
from megatron.model.padded_vocab import padded_vocab_size
from tests.helpers.paths import CONFIGS, SHIPPED

BASE = ("model/small.yml", "paper/train.yml", "pos_emb/kerple_log.yml", "cluster/cpu.yml")


def compose(name: str, *overrides: str) -> Config:
    base = () if name.startswith(("quickstart.yml", "tasks/", "recipes/")) else BASE
    world_size = 8 if name == "recipes/gpt_neox_20B.yml" else 1
    files = [CONFIGS / part for part in (*base, name)]
    return load_config(files, overrides, world_size=world_size)


LARGE = {
    name for name in SHIPPED if name != "quickstart.yml" and compose(name).model.hidden_size > 2048
}
"""Models that no test builds; `test_published_sizes.py` counts their parameters."""


@pytest.mark.parametrize("name", sorted(set(SHIPPED) - LARGE))
def test_its_model_is_built(name):
    config = compose(name, "num_layers=1")  # the layers are alike; their number is checked below
    model = GPT(plan_of(config, 300, device_type="cpu"))
    assert model.layers[0].mlp.dense_4h_to_h.weight.shape[0] == config.model.hidden_size
    assert model.pos.name == config.model.pos_emb
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert shape_of(compose(name), 300).num_layers == compose(name).model.num_layers


@pytest.mark.parametrize(
    ("size", "divisible_by", "padded"),
    [(50257, 128, 50304), (50257, 256, 50432), (512, 128, 512), (257, 64, 320)],
)
def test_vocabulary_padding(size, divisible_by, padded):
    assert padded_vocab_size(size, divisible_by) == padded


@pytest.mark.parametrize("on", [True, False])
def test_cached_launches_are_a_key_of_the_fused_backend(on):
    keys = (f"cached_launches={on}", "num_layers=1", "attention_backend=fused", "precision=fp32")
    plan_of(compose("quickstart.yml", *keys), 300, device_type="meta")
    assert SWITCHES["cached"] is on


def test_rpe_gets_its_options_and_the_published_scale():
    config = compose("pos_emb/rpe.yml", "num_layers=1", "rpe_num_buckets=16")
    model = GPT(plan_of(config, 300, device_type="cpu"))
    assert model.theta.shape == (12, 16)
    one = model.pos.bias(torch.ones(12, 16), torch.zeros(1))
    assert torch.allclose(one, torch.full_like(one, 8.0))  # sqrt(head size 64)
