"""Test that models of transformers compute the same after they are imported."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.activations import GELUTanh, NewGELUActivation

import evaluate
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.hub.importing import import_folder
from tests.helpers.hub import SIZES, Wide, hub_model, imported_model, write_tokenizer
from tests.helpers.shards import write_documents
from tools import import_hf

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


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return a folder with a Llama in two shards, and a tokenizer that ends documents with </s>."""
    folder = tmp_path_factory.mktemp("hub") / "llama"
    model = hub_model("llama", num_key_value_heads=2, dtype=torch.bfloat16)
    model.bfloat16().save_pretrained(folder, max_shard_size="60KB")
    write_tokenizer(folder, end="</s>")
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    return folder


def test_shards_and_dtypes_and_tokenizer(llama, tmp_path, monkeypatch, capsys):
    assert len(list(llama.glob("*.safetensors"))) > 1
    run = tmp_path / "new" / "run"
    monkeypatch.setattr("sys.argv", ["import_hf.py", str(llama), str(run)])
    assert import_hf.main() == 0
    assert "(LlamaForCausalLM) ->" in capsys.readouterr().out
    saved = newest(run)
    weights = saved.weights()
    stored = {}
    for path in llama.glob("*.safetensors"):
        stored |= load_file(path)
    heads = [stored[f"model.layers.1.self_attn.{each}_proj.weight"] for each in "qkv"]
    fused = weights["layers.1.attention.query_key_value.weight"]
    assert fused.dtype == torch.bfloat16
    second = fused[32:]  # the second of two key heads: two query heads, a key, a value
    parts = [heads[0][16:], heads[1][8:], heads[2][8:]]
    assert torch.equal(second, torch.cat(parts))
    assert saved.record.config["precision"] == "bfloat16"
    assert saved.record.model["tokenizer"].startswith("HFTokenizer ")
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]
    assert import_hf.main() == 1
    assert "exists and is not empty; remove it" in capsys.readouterr().err


def test_the_suite_measures_an_imported_model(llama, tmp_path, monkeypatch, capsys):
    run, rng = tmp_path / "run", np.random.default_rng(0)
    monkeypatch.setattr("sys.argv", ["import_hf.py", str(llama), str(run)])
    assert import_hf.main() == 0
    write_documents(tmp_path / "text", (rng.integers(0, 256, 140) for _ in range(4)))
    keys = {"data_path": tmp_path / "text", "split": "0,4,0", "eval_suite_tokens": 256}
    options = [part for key, value in keys.items() for part in ("-o", f"{key}={value}")]
    call = [run / "config.yml", "--load", run, "--suite", "--lengths", "32,64,128", *options]
    monkeypatch.setattr("sys.argv", ["evaluate.py", *map(str, call)])
    assert evaluate.main() == 0
    report = json.loads((run / "suite" / "report.json").read_text())
    assert report["facts"]["checkpoint"].startswith(str(run))
    first = report["measures"]["by_length"]["rows"][0]
    assert first["length"] == 32 and first["value"] > 200  # of 300 tokens, untrained
    assert report["verdict"][0] in capsys.readouterr().out


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def place(folder, name, tensor="model.norm.weight"):
    """Let the index say that the tensor is in the file `name`."""
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map=places | {tensor: name})


def cut(folder, size):
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:size])


def only_pickles(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")


def change_tensors(folder, change):
    path = min(folder.glob("*.safetensors"))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def spoil(folder, name, value):
    """Change one number of the tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"][name]
    tensors = load_file(path)
    tensors[name].view(-1)[7] = value
    save_file(tensors, path, metadata={"format": "pt"})


def edited(**changes):
    return lambda folder: edit(folder / "config.json", **changes)


GPT = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_inner": 44}
BROKEN = {
    "only GPTNeoXForCausalLM, LlamaForCausalLM": edited(model_type="bloom", auto_map={"a": "b.c"}),
    "its class is ['LlamaForTokenClass": edited(architectures=["LlamaForTokenClassification"]),
    "hidden_size is '32', and must be a whole number": edited(hidden_size="32"),
    "mlp_bias is 'no', and must be true or false": edited(mlp_bias="no"),
    "self_attn.k_proj.weight: (16, 32), but config.json describes (32, 32)": edited(head_dim=16),
    "head_dim is 16; in GPTNeoXForCausalLM it is always hidden_size": edited(
        model_type="gpt_neox", architectures=None, head_dim=16
    ),
    "its class is 'gemma2': its norms multiply by 1 + weight": edited(
        model_type="gemma2", architectures=None
    ),
    "rotary_dim is 0, and must be a whole number": edited(
        model_type="gptj", architectures=None, **GPT, rotary_dim=0
    ),
    "word_embed_proj_dim is 16; only 32 can be imported": edited(
        model_type="opt", architectures=None, word_embed_proj_dim=16
    ),
    "do_layer_norm_before is False; only True": edited(
        model_type="opt", architectures=None, do_layer_norm_before=False
    ),
    "scale_attn_by_inverse_layer_idx is True; only False": edited(
        model_type="gpt2", architectures=None, scale_attn_by_inverse_layer_idx=True
    ),
    "qk_layernorm is True; only False": edited(
        model_type="stablelm", architectures=None, qk_layernorm=True
    ),
    "use_sliding_window is True; only False": edited(
        model_type="qwen2", architectures=None, use_sliding_window=True
    ),
    "layer_types is ['full_attention', 'sliding_attention']; windows of single": edited(
        layer_types=["full_attention", "sliding_attention"]
    ),
    "hidden_act is 'quick_gelu'; only silu": edited(hidden_act="quick_gelu"),
    "hidden_act is \"['silu']\"; only": edited(hidden_act=["silu"]),
    "quantised weights": edited(quantization_config={"bits": 4}),
    "partial_rotary_factor is 0.5": edited(partial_rotary_factor=0.5, rope_parameters=None),
    "its angles change with the length": edited(rope_scaling={"type": "dynamic", "factor": 2.0}),
    "truncate: false has": edited(rope_scaling={"rope_type": "yarn", "truncate": False}),
    "mscale_all_dim or factor is out of range": edited(
        rope_scaling={"rope_type": "yarn", "factor": "4", "mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "only one mapping for all layers": edited(rope_scaling={"full_attention": {"factor": 2.0}}),
    "num_layers: 99999999 is above": edited(num_hidden_layers=99999999),
    "lm_head.weight': not in the model": edited(tie_word_embeddings=True),
    "mlp.down_proj.weight: (32, 44), but config.json describes (32, 45)": edited(
        intermediate_size=45
    ),
    "layers.2.input_layernorm.weight: missing": edited(num_hidden_layers=3),
    "layers.1.mlp.up_proj.weight': not in the model": edited(num_hidden_layers=1),
    "tokenizer.json has 257 ids, but the model embeds only 40": edited(vocab_size=40),
    "config.json: cannot be read": lambda folder: (folder / "config.json").unlink(),
    "config.json: is not a JSON object": lambda folder: (folder / "config.json").write_text("[]"),
    "nested too deeply": lambda folder: (folder / "config.json").write_text("[" * 100000),
    "cannot be read (Error while deserializing": lambda folder: cut(folder, 100),
    "cannot be read (Error while": lambda folder: cut(folder, 20000),
    "bin, a pickle, which can run code and is not read": only_pickles,
    "has no weight_map": lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
    "is in '../a.safetensors', which names no file beside it": lambda folder: place(
        folder, "../a.safetensors"
    ),
    "is in '/etc/passwd', which names": lambda folder: place(folder, "/etc/passwd"),
    "there is no such file": lambda folder: place(folder, "model-9.safetensors"),
    r"has no 'a\x1b[31m\nb', which the index places there": lambda folder: place(
        folder, max(folder.glob("*.safetensors")).name, "a\x1b[31m\nb"
    ),
    "has weights that are NaN or infinite:\n  model.norm.weight\n": lambda folder: spoil(
        folder, "model.norm.weight", math.nan
    ),
    "infinite:\n  model.layers.1.self_attn.k_proj.weight\n": lambda folder: spoil(
        folder, "model.layers.1.self_attn.k_proj.weight", -math.inf
    ),
    "I64 numbers; only": lambda folder: change_tensors(
        folder, lambda tensors: tensors.update({k: v.long() for k, v in tensors.items()})
    ),
    "has no token <|endoftext|>": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "is not a tokenizer_config.json": lambda folder: (folder / "tokenizer_config.json").write_text(
        '{"eos_token": {}}'
    ),
    "is not a tokenizer.json": lambda folder: (folder / "tokenizer.json").write_text("{"),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_folder_that_cannot_be_imported(message, llama, tmp_path, monkeypatch, capsys):
    """The tool says why, and leaves nothing behind."""
    folder, run = tmp_path / "hub", tmp_path / "runs" / "run"
    shutil.copytree(llama, folder)
    BROKEN[message](folder)
    monkeypatch.setattr("sys.argv", ["import_hf.py", str(folder), str(run)])
    assert import_hf.main() == 1
    text = capsys.readouterr().err
    assert message in text and "unfinished" not in text
    assert not run.parent.exists() or not list(run.parent.iterdir())


def test_a_link_out_of_the_folder_is_refused(llama, tmp_path, monkeypatch, capsys):
    secret = tmp_path / "passwd"
    secret.write_text('{"secret": 1}')
    names = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    names += [path.name for path in llama.glob("*.safetensors*")]
    for number, name in enumerate(names):
        folder, run = tmp_path / str(number), tmp_path / f"run{number}"
        shutil.copytree(llama, folder)
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
        monkeypatch.setattr("sys.argv", ["import_hf.py", str(folder), str(run)])
        assert import_hf.main() == 1 and not run.exists()
        found = capsys.readouterr().err
        assert f"{folder / name}: is a link out of the folder, to {secret}" in found


def test_a_folder_of_the_hubs_cache_is_imported(llama, tmp_path):
    """There the files are links from `snapshots` to `blobs`; the folder itself may be a link."""
    cache = tmp_path / "hub" / "models--some--llama"
    snapshot, blobs = cache / "snapshots" / "0123abc", cache / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    for number, path in enumerate(sorted(llama.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "named").symlink_to(snapshot)
    for number, source in enumerate((snapshot, tmp_path / "named")):
        import_folder(source, tmp_path / f"run{number}")
        assert newest(tmp_path / f"run{number}") is not None
        assert not (tmp_path / f"run{number}" / "tokenizer.json").is_symlink()


def test_an_import_to_a_full_disk(llama, tmp_path, monkeypatch, capsys, full_disk):
    monkeypatch.setattr("sys.argv", ["import_hf.py", str(llama), str(tmp_path / "run")])
    with full_disk(20_000):
        assert import_hf.main() == 1
    text = capsys.readouterr().err
    assert "error: the weights: a file could not be written to its end" in text
    assert f"{tmp_path}/" in text and "mp_rank_00_model_states.pt" in text
    assert not list(tmp_path.iterdir())


def test_names_of_other_versions_are_read(tmp_path):
    hub_model("gpt_neox").save_pretrained(tmp_path / "hub")

    def rename(tensors):
        tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
        tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(1)
        tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.ones(1)

    change_tensors(tmp_path / "hub", rename)
    [note, line] = import_folder(tmp_path / "hub", tmp_path / "run")
    assert "has no tokenizer.json or tokenizer.model: name tokenizer_type and vocab_file in" in note
    there = load_file(tmp_path / "hub" / "model.safetensors")
    assert torch.equal(newest(tmp_path / "run").weights()["output.weight"], there["lm_head.weight"])
