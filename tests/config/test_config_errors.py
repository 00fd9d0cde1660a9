"""Test that all mistakes are reported together, with file, line, key and what to write instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import ConfigError, load_config
from megatron.config.describe import describe
from megatron.config.neox.known_keys import KNOWN_KEYS

Problems = Callable[..., list[str]]
TOPS = {key.split(".")[0] for key in KNOWN_KEYS}
LEAVES = {key.rpartition(".")[2] for key in KNOWN_KEYS if "." in key}
BASE = """{num_layers: 2, hidden_size: 64, num_attention_heads: 4, seq_length: 32, pos_emb: none,
train_iters: 10, train_micro_batch_size_per_gpu: 4, optimizer: {type: Adam, params: {lr: 1e-3}}}"""


def test_the_misspelt_embedding(problems: Problems) -> None:
    (line,) = problems("# a comment\npos_emb: kerpel_log\n")
    assert line.startswith("over.yml:2: pos_emb: ")
    assert "did you mean kerple_log?" in line


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ("train_iter: 5", "train_iter", "did you mean train_iters?"),
        ("hiden-size: 5", "hiden_size", "did you mean hidden_size?"),
        ("lr_decay_stile: cosine", "lr_decay_stile", "did you mean lr_decay_style?"),
        ("betas: [0.9, 0.95]", "betas", "write it inside optimizer.params"),
        ("stage: 1", "stage", "write it inside zero_optimization"),
        ("optimizer: {params: {beta: 1}}", "optimizer.params.beta", "did you mean betas?"),
        ("zero_optimization: {stag: 1}", "zero_optimization.stag", "did you mean stage?"),
        ("fp16: {enable: true}", "fp16.enable", "did you mean enabled?"),
        ("optimizer: Adam", "optimizer", "expected a mapping with keys such as type"),
        ("zero_optimization: 1", "zero_optimization", "write e.g. zero_optimization: {stage: V"),
        ("num_layers: {a: 1}", "num_layers.a", "num_layers takes a plain value"),
        ("qqq: {a: 1, b: 2}", "qqq", "no known key is similar; drop it"),
    ],
)
def test_unknown_keys(problems: Problems, text: str, key: str, hint: str) -> None:
    lines = [line for line in problems(text) if "required" not in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"over.yml:1: {key}: ")
    assert hint in lines[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("num_layers: twelve", "whole number of at least 1, got the text 'twelve'"),
        ("num_layers: '12'", "write 12 without quotes"),
        ("num_layers: 2.5", "got 2.5"),
        ("num_layers: true", "got true"),
        ("num_layers: 0", "at least 1, got 0"),
        ("hidden_dropout: 1.5", "a number from 0 to 1, got 1.5"),
        ("hidden_dropout: .nan", "a number from 0 to 1, got nan"),
        ("warmup: 500", "write the fraction of lr_decay_iters"),
        ("no_weight_tying: 1", "expected true or false, got 1"),
        ("save: 3", "write it between quotes"),
        ("norm: layer_norm", "did you mean layernorm?"),
        ("norm: [rmsnorm]", "expected one of layernorm, rmsnorm, scalenorm"),
        ("lr_decay_style: cosin", "did you mean cosine?"),
        ("tokenizer_type: GPT2Tokenizer", "did you mean GPT2BPETokenizer?"),
        (
            "optimizer: {type: Lion}",
            "'Lion' is refused: not built yet; write one of adam, fusedadam, sgd",
        ),
        ("optimizer: {type: Adm}", "did you mean adam?"),
        ("optimizer: {params: {lr: -1}}", "at least 0, got -1"),
        ("optimizer: {params: {betas: [0.9]}}", "expected two numbers"),
        ("optimizer: {params: {betas: [0.9, 1]}}", "from 0 to below 1"),
        ("optimizer: {params: {eps: 1.0e_8}}", "got the text '1.0e_8'; write e.g. 1e-8"),
        ("optimizer: {params: {weight_decay: 0.1}}", "GPT-NeoX reads it at the top"),
        ("zero_optimization: {stage: 4}", "from 0 to 3, got 4"),
        ("zero_optimization: {overlap_comm: 1}", "expected true or false"),
        ("zero_optimization: {reduce_bucket_size: big}", "whole number"),
        ("zero_optimization: {reduce_bucket_size: 0}", "whole number"),  # DeepSpeed refuses 0
        ("fp16: {enabled: true, min_loss_scale: 0}", "whole number of at least 1, got 0"),
        ("zero_optimization: {cpu_offload: true}", "offloading to the CPU is not built"),
        ("zero_optimization: {offload_optimizer: {device: cpu}}", "offloading to the CPU"),
        ("pipe_parallel_size: 2", "1 process(es) cannot form groups of pipe_parallel_size 2 x "),
        ("model-parallel-size: 4", "1 process(es) cannot form groups of pipe_parallel_size 1 x "),
        ("attention_backend: fusd", "fused"),
        ("attention_config: [[[local, global], all]]", "attention types local are not built"),
        ("attention_config: [[[local], 2]]", "not built; write e.g. [[[global], 2]], or drop it"),
        ("attention_config: [[[global], 3]]", "names 3 layers, but num_layers is 2"),
        ("attention_config: global", "names 1 layers, but num_layers is 2"),
        ("attention_config: [[global, 2]]", "expected [[[types], layers], ...]"),
        ("activation: swigl", "swiglu"),
        ("pos_emb: CoPE", "'CoPE' is refused: its positions are sums of gates over a row's scores"),
        ("pos_emb: dape", "it mixes the scores of all heads in a network"),
        ("pos_emb: capev2", "it mixes the scores of all heads in a network"),
        ("pos_emb: kerple_c", "it mixes the scores of all heads in a network"),
        ("pos_emb: pope", "its scores are products of vectors of twice the head size"),
        ("pos_emb: path", "it transforms keys by a matrix of every token"),
        ("pos_emb: wall", "it decays each channel of a score"),
        ("pos_emb: stick_breaking", "it replaces the softmax"),
        ("pos_emb: selective", "it lowers each score by the scores of earlier queries"),
        ("pos_emb: xl_bias", "its bias depends on the content of the query; write one of alibi, "),
        ("use_bias_in_norms: 1", "expected true or false"),
        ("data_impl: lazy", "only the mmap format is read; write data_impl: mmap instead"),
        ("num_workers: many", "a whole number of at least 0, got the text 'many'"),
        ("intermediate_size: 2\nactivation: glu", "no inner width (glu); write at least 3"),
        ("expansion_factor: 4\nintermediate_size: 100", "over.yml:2; write only one of them"),
        ("expansion_factor: 0", "expected a number above 0, got 0; write e.g. 4"),
        ("expansion_factor: .inf", "expected a number above 0, got inf; write e.g. 4"),
        ("expansion_factor: 4\nhidden_size: .inf", "hidden_size: expected a whole number"),
        ("expansion_factor: 1.0e+307", "intermediate_size: "),
        (f"expansion_factor: 4.5\nhidden_size: {10**400}", "hidden_size: "),
        ("lr_decay_fraction: 0.5\ntrain_iters: .inf", "train_iters: expected a whole number"),
        ("expansion_factor: .nan", "expected a number above 0, got nan; write e.g. 4"),
        ("train_data_paths: [a]", "needs valid_data_paths and test_data_paths too"),
        ("train_data_paths: [3]", "expected a list of paths, got [3]"),
        ("data_path: []", "an empty list names no data"),
        ("data_path: [a, 3]", "expected a list of paths"),
        ("data_path: [a, 'builtin:python-stdlib']", "stands alone; write builtin:python-stdlib"),
        ("train_data_weights: [0.5]", "1 weights for 0 paths"),
        ("train_data_weights: [-1]", "got the weight -1; write one number >= 0"),
        ("train_data_weights: [0, 0]", "not all zero"),
        ("weighted_sampler_alpha: 0", "above 0, got 0"),
        ("data_path: builtin:stdlib", "write builtin:python-stdlib"),
        ("split: 1,2,3,4", "up to three proportions"),
        ("split: 0,0,0", "not all zero"),
        ("split: a,b", "proportions of train, valid and test"),
        ("eval_lengths: [128, -2]", "at least 1, got -2"),
        ("eval_lengths: [64.5]", "got 64.5"),
        ("eval_lengths: {a: 1}", "eval_lengths takes a plain value"),
        ("eval_lengths: [128]\neval_tokens: 100", "fewer than the longest of eval_lengths, 128"),
        ("min_lr: 1.0", "above optimizer.params.lr 0.001"),
        ("hidden_size: 66", "66 / 4 = 16.5); write e.g. hidden_size: 64"),
        ("checkpoint_scale: log", "write linear instead"),
        ("save_interval: 10\ncheckpoint_factor: 20", "they are the same; keep one"),
        ("lr_decay_fraction: 2", "above 0, up to 1, got 2"),
        ("wsd_decay_ratio: 0", "above 0, up to 1, got 0"),
        ("optimizer: {params: {betas: '3'}}", "expected two numbers, got the text '3'; write e.g."),
        ("pos_emb_options: 3", "got 3; input should be a valid dictionary"),
        ("batch_size: 3", "write train_micro_batch_size_per_gpu instead"),
        ("lr: 1e-3", "write optimizer: {params: {lr: ...}} instead"),
        ("warmup_iters: 10", "warmup: warmup_iters / lr_decay_iters"),
        ("apply_query_key_layer_scaling: true", "not built yet; write false"),
        (
            "override_lr_scheduler: true\nuse_checkpoint_lr_scheduler: true",
            "both are true; write only one",
        ),
        ("optimizer: {params: {momentum: 0.9}}", "drop momentum, or write type: sgd"),
    ],
)
def test_wrong_values(problems: Problems, text: str, says: str) -> None:
    lines = problems(text)
    assert len(lines) == 1, lines
    assert lines[0].startswith("over.yml:")
    assert says in lines[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pos_emb: learned\nseq_length_val: 64", "write max_position_embeddings: 64"),
        ("pos_emb: learned\neval_lengths: [32, 128]", "write max_position_embeddings: 128"),
        ("pos_emb: learned\neval_lengths: [64]", "for a trained model, give shorter --lengths"),
        ("pos_emb: learned\nmax_position_embeddings: 16", "where learned positions end"),
        ("pos_emb: learned\nopt_pos_emb_offset: 2", "write max_position_embeddings: 34"),
        ("pos_emb: rotary\nrotary_pct: 0.1", "= 1; choose"),
        ("pos_emb: rotary\nhidden_size: 60", "int(head size 15 x rotary_pct 1.0) = 15"),
        ("pos_emb: rotary\nrotary_pct: 0", "= 0; choose"),
        ("pos_emb: sinusoidal\nhidden_size: 15\nnum_attention_heads: 5", "write 16"),
        ("pos_emb: rpe\nrpe_num_buckets: 300", "must be above 150"),
    ],
)
def test_relations_of_an_embedding(problems: Problems, text: str, says: str) -> None:
    lines = problems(text)
    assert len(lines) == 1, lines
    assert says in lines[0]


def test_lengths_bind_only_learned_positions(load: Callable) -> None:
    config = load("max_position_embeddings: 16\nseq_length_val: 4096\neval_lengths: [2048]")
    assert config.model.max_position_embeddings == 16


@pytest.mark.parametrize(
    "text",
    [
        "precision: fp32\nfp16: {enabled: true}",
        "precision: fp16\nfp16: {enabled: true, type: bfloat16}",
        "bf16: {enabled: true}\nfp16: {enabled: true}",
    ],
)
def test_contradicting_precisions_name_both_places(problems: Problems, text: str) -> None:
    (line,) = problems(text)
    assert "precisions contradict" in line
    assert "over.yml:1" in line and "over.yml:2" in line


def test_bfloat16_that_is_not_enabled_is_ambiguous(problems: Problems) -> None:
    (line,) = problems("fp16: {enabled: false, type: bfloat16}")
    assert "write enabled: true, or drop the type" in line


def test_all_errors_at_once_in_order(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yml", tmp_path / "second.yml"
    first.write_text("num_layers: x\nhidden_size: 770\nnum_attention_heads: 12\nnum_layers: 2\n")
    second.write_text("pos_emb: rotari\ntrain_itrs: 5\n")
    with pytest.raises(ConfigError) as caught:
        load_config([first, second, tmp_path / "third.yml"], ["norm=x", "seq_length"])
    marks = [str(problem.mark).removeprefix(f"{tmp_path}/") for problem in caught.value.problems]
    assert marks == [
        *("first.yml:1", "first.yml:2", "first.yml:4"),
        *("second.yml:1", "second.yml:2"),
        "third.yml",
        *("-o norm=x", "-o seq_length"),
    ]
    assert str(caught.value).startswith("8 problems in the configuration:\n")


def test_required_keys(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yml"
    empty.write_text("")
    with pytest.raises(ConfigError) as caught:
        load_config([empty])
    assert [problem.key for problem in caught.value.problems] == [
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
        "train_iters",
        "optimizer.params.lr",
        "train_micro_batch_size_per_gpu",
    ]
    assert all("required, but not in" in problem.text for problem in caught.value.problems)


def test_null_takes_a_key_away(problems: Problems, load: Callable) -> None:
    (line,) = problems("num_layers: null")
    assert line.startswith("num_layers: required")
    assert load("precision: bf16\nfp16: {enabled: true}", "fp16=null").training.precision == "bf16"


def test_an_override_is_named_in_its_error(problems: Problems) -> None:
    (line,) = problems("", "pos_emb=alibu")
    assert line.startswith("-o pos_emb=alibu: pos_emb: ")
    assert "did you mean alibi?" in line


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(sorted(LEAVES)) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(TOPS)) | st.text(max_size=6), junk, max_size=6))
def test_any_content_loads_or_is_reported(tmp_path_factory: Any, tree: dict) -> None:
    directory = tmp_path_factory.mktemp("junk")
    base, over = directory / "base.yml", directory / "over.yml"
    base.write_text(BASE)
    over.write_text(json.dumps(tree))
    try:
        config = load_config([base, over])
    except ConfigError as error:
        assert error.problems
        assert all(problem.text for problem in error.problems)
    else:
        assert describe(config)
        json.dumps(config.to_flat_dict())


@pytest.mark.parametrize("said", [0, "-1", "two", ""])
def test_a_wrong_world_size(base: Path, said: int | str) -> None:
    with pytest.raises(ConfigError, match=f"WORLD_SIZE: the number of processes, is '{said}'"):
        load_config([base], world_size=said)


def test_a_world_size_as_a_launcher_says_it(base: Path) -> None:
    assert load_config([base], world_size="2").parallel.world_size == 2
