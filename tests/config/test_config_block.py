"""Test the config keys of a block: heads, the norm of queries and keys, scaled rotary angles."""

from __future__ import annotations

from collections.abc import Callable

import pytest

YARN = "original_max_position_embeddings: 64, type: yarn, factor: 2"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("num_kv_heads: 3", "3 does not divide num_attention_heads 4; write a divisor of 4"),
        ("rope_scaling: 4", "expected a mapping, got 4; write e.g. {rope_type: ntk, factor: 4.0}"),
        ("rope_scaling: {factor: 2}", "expected one of linear, ntk, yarn, llama3, got null"),
        ("rope_scaling: {type: dynamic}", "its angles change with the length of the text"),
        ("rope_scaling: {type: yarn, factor: 2}", "write e.g. original_max_position_embeddings: 2"),
        (f"rope_scaling: {{{YARN}, beta_slow: 40}}", "beta_slow is not below beta_fast"),
        ("rope_scaling: {type: ntk, factor: 2, beta_fast: 3}", "ntk has no beta_fast"),
        ("rope_scaling: {type: ntk, factor: 0.5}", "factor: expected a number of at least 1, got"),
        ("rope_scaling: {type: ntk, factor: 2}", "rotary, which is not in pos_emb; leave it out"),
        (
            "pos_emb: rotary\nrope_scaling: {type: ntk, factor: 2}\n"
            "pos_emb_options: {rope_type: yarn, factor: 3}",
            "so does pos_emb_options; leave one of them out",
        ),
        (
            "pos_emb: rotary + alibi\nrope_scaling: {type: ntk, factor: 2}\n"
            "pos_emb_options: {rotary: {rope_type: linear, factor: 3}}",
            "so does pos_emb_options; leave one of them out",
        ),
        (
            "published_numerics: true\nnorm: rmsnorm\nrmsnorm_fusion: true",
            "does not round as the published code; write rmsnorm_fusion: false",
        ),
        (
            "rope_scaling: {type: llama3, factor: 2, original_max_position_embeddings: 64, "
            "low_freq_factor: 4}",
            "low_freq_factor is not below high_freq_factor",
        ),
    ],
)
def test_wrong_values(problems: Callable, text: str, says: str) -> None:
    lines = problems(text)
    assert any(says in line for line in lines), lines


def test_options_of_rotary_that_are_no_options_are_no_second_scaling(load: Callable) -> None:
    """They are refused when the embedding is built, which names the term."""
    scaled = "pos_emb: rotary\nrope_scaling: {type: ntk, factor: 2}"
    assert load(f"{scaled}\npos_emb_options: {{rotary: 3}}").model.pos_emb_options == {"rotary": 3}


def test_names_between_commas_lose_their_spaces(load: Callable) -> None:
    assert load("eval_tasks: piqa, sciq").evaluation.eval_tasks == ("piqa", "sciq")


def test_the_weights_of_a_key_head_stay_on_one_rank(problems: Callable) -> None:
    (line,) = problems("num_kv_heads: 1\nmodel_parallel_size: 2", world_size=2)
    assert "model_parallel_size 2 does not divide 1, and the weights of a key head" in line
    assert "write num_kv_heads: 2, or a smaller model_parallel_size" in line


def test_scaled_angles_are_read_and_written_back(load: Callable, tmp_path) -> None:
    config = load(f"pos_emb: rotary\nrope_scaling: {{{YARN}}}", "rope_scaling.beta_fast=16")
    scaling = config.model.rope_scaling
    assert scaling == {
        "rope_type": "yarn",
        "original_max_position_embeddings": 64,
        "factor": 2.0,
        "beta_fast": 16.0,
    }
    assert load(config.to_yaml()) == config
    for key in ("rope_type", "type"):
        assert load(f"rope_scaling: {{{key}: default}}").model.rope_scaling == {}


@pytest.mark.parametrize(
    ("text", "ranks", "multiple"),
    [("make_vocab_size_divisible_by: 1", 2, 2), ("make_vocab_size_divisible_by: 6", 4, 12)]
    + [("num_attention_heads: 6\nhidden_size: 36", 3, 384)],  # the default is 128
)
def test_the_vocabulary_is_padded_for_the_ranks(load: Callable, text, ranks, multiple) -> None:
    config = load(f"{text}\nmodel_parallel_size: {ranks}", world_size=ranks)
    (note,) = config.notes
    assert f"make_vocab_size_divisible_by: {multiple} instead of" in note
    assert config.model.make_vocab_size_divisible_by == multiple
    again = load(config.to_yaml(), "model_parallel_size=1")
    assert again.model.make_vocab_size_divisible_by == multiple and again.notes == ()
