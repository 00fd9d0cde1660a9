"""Test imports of models of transformers: their files, and what is refused."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import evaluate
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.hub.importing import import_folder
from tests.helpers.hub import hub_model, write_tokenizer
from tests.helpers.shards import write_documents
from tools import import_hf


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


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_the_suite_measures_an_imported_model(kind, tmp_path, monkeypatch, capsys):
    """Without lengths it measures 1 to 16 times the training length, here 16 tokens."""
    run, rng = tmp_path / "run", np.random.default_rng(0)
    hub_model(kind, max_position_embeddings=16).save_pretrained(tmp_path / "hub")
    write_tokenizer(tmp_path / "hub")
    import_folder(tmp_path / "hub", run)
    write_documents(tmp_path / "text", (rng.integers(0, 256, 260) for _ in range(4)))
    keys = {"data_path": tmp_path / "text", "split": "0,4,0", "eval_suite_tokens": 256}
    options = [part for key, value in keys.items() for part in ("-o", f"{key}={value}")]
    call = [run / "config.yml", "--load", run, "--suite", *options]
    monkeypatch.setattr("sys.argv", ["evaluate.py", *map(str, call)])
    assert evaluate.main() == 0
    report = json.loads((run / "suite" / "report.json").read_text())
    assert report["facts"]["checkpoint"].startswith(str(run))
    found = {name: measure["rows"] for name, measure in report["measures"].items()}
    assert [row["length"] for row in found["by_length"]] == [16, 32, 64, 128, 256]
    assert found["by_length"][0]["value"] > 200  # of 300 tokens, untrained
    assert len(found["heads"]) == 8 and {"heads_layer0", "heads_layer1"} <= set(found)
    assert report["measures"]["copy"]["answer"] == []
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
    "its class is 'gemma2'; only GPTNeoXForCausalLM": edited(
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
