"""Test that transformers loads an export, which gives our logits and continues texts."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from megatron.config import load_config
from megatron.engine.build import plan_of, tokenizer_of
from megatron.engine.open_run import OpenRun
from megatron.hub import export
from megatron.model import GPT
from megatron.model.embedding import scale_distances
from megatron.model.theta import is_theta
from megatron.positional import names

TRAINED = 6
SMALL = {
    "tokenizer_type": "ByteLevelTokenizer",
    "make_vocab_size_divisible_by": 8,
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "seq_length": TRAINED,
    "max_position_embeddings": 40,
    "attention_backend": "eager",
    "optimizer": {"type": "Adam", "params": {"lr": 1.0}},
    "train_iters": 1,
    "data_path": "nowhere",
    "train_micro_batch_size_per_gpu": 1,
}
CROSSES = {
    "rotary + kerple_log + forget_gate": {"num_kv_heads": 2, "norm": "rmsnorm"},
    "rotary + log_n + sink": {"use_qk_layernorm": True, "num_kv_heads": 1},
    "sinusoidal + kerple_power_mul + log_n + forget_gate + sink": {"norm": "scalenorm"},
    "alibi + fire + forget_gate": {"eval_distance_scale": 0.5, "gpt_j_residual": True},
}
BLOCKS = [
    {"activation": "swiglu", "use_bias_in_attn_linear": False, "use_bias_in_mlp": False},
    {"activation": "geglu", "norm": "rmsnorm", "rmsnorm_fusion": True, "use_qk_layernorm": True},
    {"activation": "reglu", "no_weight_tying": True, "intermediate_size": 24},
    {"activation": "glu", "norm": "scalenorm", "use_qk_layernorm": True},
    {"activation": "bilinear", "gpt_j_residual": True, "norm": "rmsnorm"},
    {"activation": "mish", "attention_output_gate": True, "num_kv_heads": 2},
    {
        **{"norm": "rmsnorm", "rmsnorm_fusion": True, "num_kv_heads": 2, "head_dim": 6},
        **{"use_qk_layernorm": True, "qk_layernorm_kind": "joined", "output_norms": True},
    },
    {
        **{"use_qk_layernorm": True, "qk_layernorm_kind": "shared", "head_dim": 2},
        **{"use_bias_in_attn_linear": False, "add_qkv_bias": True},
        **{"output_layer_bias": True, "no_weight_tying": True},
        **{"gpt_j_residual": True, "gpt_j_tied": True, "attention_output_gate": True},
    },
    {"activation": "softsign", "sliding_window_width": 3},
    {"activation": "swish", "sliding_window_width": [[["none", 3], "all"]]},
    {"bias_gelu_fusion": True, "opt_pos_emb_offset": 2, "pos_emb": "learned"},
    {"activation": "relu", "theta_per_layer": True, "pos_emb": "kerple_power"},
    {"pos_emb": [[["kerple_log + forget_gate", "rpe"], "all"]], "theta_per_layer": True},
    {"pos_emb": [[["kerple_log", "rotary"], "all"]], "eval_distance_scale": 0.25},
    {"pos_emb": "rotary", "rotary_pct": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2}},
    {"pos_emb": "rotary", "reset_attention_mask": True, "reset_position_ids": True},
    {"pos_emb": "fire", "pos_emb_options": {"length": 4}, "reset_attention_mask": True},
    {
        "pos_emb": "log_n + bam + sink",
        "pos_emb_options": {"log_n": {"temper_bias": True}},
        "reset_attention_mask": True,
    },
    {"pos_emb": "kerple_log", "reset_attention_mask": True, "tokenizer_type": "CharLevelTokenizer"},
]


def run_of(**changes) -> OpenRun:
    """Return a run with random weights in float64."""
    config = load_config([], [f"{key}={value!r}" for key, value in (SMALL | changes).items()])
    tokenizer = tokenizer_of(config)
    eod = tokenizer.eod
    plan = plan_of(config, tokenizer.vocab_size, device_type="cpu", eod=eod, training=False)
    torch.manual_seed(1)
    model = GPT(plan).eval()
    scale_distances(model, config.evaluation.eval_distance_scale)
    with torch.no_grad():
        for name, each in model.named_parameters():  # so that every term and every layer counts
            noise = torch.rand_like(each) if is_theta(name) else torch.randn_like(each)
            each.add_(noise, alpha=0.3)
    return OpenRun(config, tokenizer, model.double(), None, [])


def exported(run: OpenRun, folder: Path):
    """Export the run, and return the model that the export loaded for its comparison."""
    loaded = []

    class Keeping:
        @staticmethod
        def from_pretrained(*args, **kwargs):
            loaded.append(AutoModelForCausalLM.from_pretrained(*args, **kwargs))
            return loaded[0]

    folder.mkdir()
    with mock.patch.object(export, "AutoModelForCausalLM", Keeping):
        export.export(run, folder)
    return loaded[0]


CASES = [{"pos_emb": name} for name in names()]
CASES += [{"pos_emb": name, **block} for name, block in CROSSES.items()] + BLOCKS


@torch.no_grad()
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_logits_and_generation(tmp_path, changes):
    """Logits are ours; texts of a batch, padded at their starts, continue as each alone."""
    run = run_of(**changes)
    theirs = exported(run, tmp_path / "out")
    size = run.tokenizer.vocab_size
    ids = torch.randint(1, size, (3, 24), generator=torch.Generator().manual_seed(2))
    ids[1, 9] = run.tokenizer.eod
    wanted = run.model(ids)
    assert wanted.std() > 0.1
    torch.testing.assert_close(theirs(ids).logits, wanted, rtol=0, atol=1e-9)
    short = ids[2:, :5]
    both = torch.cat((ids[:1, :14], F.pad(short, (9, 0), value=run.tokenizer.eod)))
    mask = torch.ones_like(both)
    mask[1, :9] = 0
    settings = {"max_new_tokens": 4 * TRAINED, "do_sample": False}
    settings |= {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    padded = theirs(both, attention_mask=mask).logits[1:, 9:]
    torch.testing.assert_close(padded, run.model(short), rtol=0, atol=1e-9)
    found = theirs.generate(both, attention_mask=mask, **settings)
    assert found.sequences.max() < size
    for row, begin in ((0, 0), (1, 9)):
        text = found.sequences[row : row + 1, begin:]
        assert text.shape[1] > 4 * TRAINED
        run.model.documents = None  # a text that ended goes on in the same document
        alone = theirs(text).logits if theirs.config.document_end is not None else run.model(text)
        logits = torch.stack(found.logits, 1)[row]  # in fp32
        new = slice(both.shape[1] - begin - 1, -1)
        torch.testing.assert_close(logits, alone[0, new].float(), rtol=0, atol=1e-5)
        assert torch.equal(logits[:, :size].argmax(-1), text[0, both.shape[1] - begin :])
