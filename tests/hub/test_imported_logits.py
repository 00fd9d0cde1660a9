"""Test that models of transformers have the same logits after they are imported."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import GELUTanh, NewGELUActivation

from megatron.hub.config_keys import keys_of
from megatron.hub.importing import import_folder
from tests.helpers.hub import SIZES, Wide, hub_model, imported_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "neox": ("gpt_neox", {}),
    "neox serial tied": (
        "gpt_neox",
        {"use_parallel_residual": False, "tie_word_embeddings": True, "hidden_act": "relu"},
    ),
    "neox without biases": (
        "gpt_neox",
        {"attention_bias": False, "rotary_pct": 0.5, "rotary_emb_base": 500, "layer_norm_eps": 0.1},
    ),
    "neox tanh": ("gpt_neox", {"hidden_act": "gelu_new", "rotary_pct": 1.0}),
    "neox yarn": ("gpt_neox", {"rope_parameters": {**YARN, "partial_rotary_factor": 1.0}}),
    "llama": ("llama", {"rms_norm_eps": 0.1, "rope_theta": 500.0}),
    "llama grouped": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama 3": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "llama yarn": ("llama", {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.1}}),
    "llama yarn old": ("llama", {"rope_scaling": {**YARN, "beta_fast": 4, "beta_slow": 0.5}}),
    "mistral": ("mistral", {"num_key_value_heads": 1, "sliding_window": 5}),
    "mistral, large heads": ("mistral", {"head_dim": 16, "num_key_value_heads": 2}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2 untied": (
        "qwen2",
        {"num_key_value_heads": 4, "rope_parameters": {**YARN, "rope_theta": 1e6}},
    ),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 0.1}),
    "qwen3 tied": (
        "qwen3",
        {
            **{"num_key_value_heads": 4, "head_dim": 8, "attention_bias": True},
            **{"tie_word_embeddings": True, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        },
    ),
    "olmo2": ("olmo2", {"num_key_value_heads": 2, "rms_norm_eps": 0.1}),
    "olmo2 tied": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "stablelm": ("stablelm", {"num_key_value_heads": 2, "use_qkv_bias": True}),
    "stablelm parallel": (
        "stablelm",
        {
            **{"num_key_value_heads": 4, "use_parallel_residual": True},
            **{"tie_word_embeddings": True, "partial_rotary_factor": 0.5},
        },
    ),
    "phi": ("phi", {"num_key_value_heads": 2}),
    "phi whole": ("phi", {"partial_rotary_factor": 1.0, "layer_norm_eps": 0.1}),
    "gptj": ("gptj", {"rotary_dim": 4}),
    "gptj whole": ("gptj", {"rotary_dim": 8, "layer_norm_epsilon": 0.1, "n_inner": None}),
    "gpt2": ("gpt2", {"n_inner": None}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False, "activation_function": "relu"}),
    "opt": ("opt", {}),
    "opt untied": ("opt", {"tie_word_embeddings": False, "enable_bias": False}),
    "mistral 1": ("mistral", {"num_key_value_heads": 4, "sliding_window": 1}),
    "mistral whole": ("mistral", {"num_key_value_heads": 2, "sliding_window": None}),
}


def rounded_gelu(x):
    """Compute gelu's tanh approximation. The released code rounds its constant to eight digits."""
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3)))


def exact(theirs, ours):
    """Convert a model of transformers to float64, with rotary angles that are not rounded."""
    pos, block = ours.pos, ours.shape.block
    rotary = getattr(theirs.base_model, "rotary_emb", None)
    theirs = theirs.double()
    for each in theirs.modules():
        if isinstance(each, NewGELUActivation | GELUTanh):
            each.forward = rounded_gelu
    if pos.name != "rotary":
        return theirs
    turns = pos.frequencies(block.rotary_ndims, block.rotary_base, torch.float64, None)
    if rotary is not None:
        torch.testing.assert_close(rotary.inv_freq.double(), turns, rtol=1e-6, atol=0)
        rotary.inv_freq = turns  # theirs are rounded to fp32 after scaling
        return theirs
    angles = torch.arange(4 * SIZES["max_position_embeddings"])[:, None] * turns
    for layer in theirs.transformer.h:  # GPT-J, whose table would end at the trained length
        table = layer.attn.embed_positions
        layer.attn.embed_positions = torch.cat((angles.sin(), angles.cos()), 1)
        torch.testing.assert_close(
            layer.attn.embed_positions[: len(table)], table, rtol=1e-6, atol=1e-6
        )
    return theirs


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_has_the_logits_of_transformers(name, tmp_path):
    """At four times the trained length, at once and with a cache."""
    kind, changes = MODELS[name]
    theirs = hub_model(kind, **changes)
    theirs.save_pretrained(tmp_path / "hub")
    import_folder(tmp_path / "hub", tmp_path / "run")
    ours = imported_model(tmp_path / "run")
    times = 4 if ours.embedding.position_embeddings is None else 1  # a table has no more rows
    length = times * SIZES["max_position_embeddings"]
    tokens = torch.randint(300, (2, length), generator=torch.Generator().manual_seed(1))
    theirs = exact(theirs, ours)
    with Wide():
        wanted = theirs(tokens).logits
    assert wanted.dtype == torch.float64
    cache = ours.new_cache(torch.full((2,), length))
    pieces = tokens.split([length // 2, 1, 3, length // 2 - 4], dim=1)
    cached = [ours.extend(each, cache, last_only=False) for each in pieces]
    for logits in (ours(tokens), torch.cat(cached, dim=1)):
        assert (logits - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize("kind", ["gpt2", "gptj"])
def test_a_config_without_n_inner_has_an_mlp_of_four_times_the_width(kind):
    """OpenAI's GPT-2 has no such entry."""
    found = hub_model(kind).config.to_dict()
    del found["n_inner"]
    assert keys_of(found)["intermediate_size"] == 4 * SIZES["hidden_size"]
