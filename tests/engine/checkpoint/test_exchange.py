"""Test exports to GPT-NeoX's layout: read back, they are the same model."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

from megatron.config import ConfigError, load_config
from megatron.engine.build import plan_of
from megatron.engine.checkpoint.checksums import sealed
from megatron.engine.checkpoint.exchange import export_checkpoint, import_checkpoint
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.saved_checkpoints import Saved, newest
from megatron.engine.errors import CheckpointError
from megatron.engine.model_shape import DTYPES
from megatron.engine.neox import read as neox
from megatron.engine.neox.layout import EMBEDDINGS
from megatron.model import GPT
from megatron.positional import names
from megatron.run_folder import is_published, tag_of
from tests.helpers.paths import FIXTURES
from tools.reshape_checkpoint import reshape

MODELS = FIXTURES / "parity" / "models"
VOCAB = 48
KEYS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "train_iters": 5,
    "train_micro_batch_size_per_gpu": 2,
    "make_vocab_size_divisible_by": 16,
    "tokenizer_type": "CharLevelTokenizer",
    "rotary_pct": 0.5,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
}


def own_checkpoint(folder, **changes):
    """Write a run folder with a checkpoint at step 5, and return (config, model)."""
    folder.mkdir()
    path = folder / "config.yml"
    path.write_text(json.dumps(KEYS | changes))
    config = load_config([path])
    model = GPT(plan_of(config, VOCAB, device_type="cpu")).to(DTYPES[config.training.precision])
    with torch.no_grad():
        for param in model.parameters():  # zero biases would hide a lost one
            param.add_(torch.rand_like(param) * 0.1)
    tag = tag_of(5)
    (folder / tag).mkdir()
    torch.save({"module": model.state_dict()}, folder / tag / "mp_rank_00_model_states.pt")
    record = {
        "progress": {"step": 5, "consumed_samples": 10, "train_samples": 10},
        "layout": {"zero_stage": 1, "data_parallel_size": 1},
        "config": config.to_flat_dict(),
        "lineage": "c0ffee",
    }
    (folder / tag / "kerple.json").write_text(json.dumps(record))
    (folder / "latest").write_text(tag)
    return config, model


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("pos_emb", sorted(EMBEDDINGS))
def test_what_is_exported_is_the_same_model(tmp_path, pos_emb, parts):
    changes = {"pos_emb": pos_emb, "no_weight_tying": pos_emb != "alibi"}
    changes |= {"activation": "geglu"} if pos_emb == "rotary" else {}
    changes |= {"precision": "bfloat16"} if pos_emb == "kerple_log" else {}
    config, model = own_checkpoint(tmp_path / "run", hidden_size=48, **changes)
    written = export_checkpoint(tmp_path / "run", tmp_path / "out", parts=parts)
    assert is_published(written) and written.name == "global_step5"
    found = neox.read(written)
    assert found.shape.parts == parts and found.step == 5 and not found.problems
    assert found.args["padded_vocab_size"] == VOCAB
    dtype = DTYPES[config.training.precision]
    other = GPT(plan_of(config, VOCAB, device_type="cpu")).to(dtype)
    load_weights(other, Saved(tmp_path / "out", written.name))
    assert {tensor.dtype for tensor in found.weights.values()} == {dtype}
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("pos_emb", "index", "buffer", "size"),
    [
        ("alibi", 3, "attention.alibi_embed.slopes", (2,)),
        ("kerple_power_original", 2, "attention.rpe.bias_a", (2, 1, 1)),
        ("rotary", 2, "attention.rotary_emb.inv_freq", (2,)),
        ("sinusoidal", 0, "position_embeddings.inv_freq", (16,)),
    ],
)
def test_buffers_are_written_where_the_published_code_looks_for_them(
    tmp_path, pos_emb, index, buffer, size
):
    own_checkpoint(tmp_path / "run", pos_emb=pos_emb)
    written = export_checkpoint(tmp_path / "run", tmp_path / "out", parts=2)
    state = torch.load(written / f"layer_{index:02d}-model_01-model_states.pt")
    assert state[buffer].shape == size


@pytest.mark.parametrize("pos_emb", sorted(set(names()) - EMBEDDINGS))
def test_an_embedding_that_the_published_code_lacks_is_refused(tmp_path, pos_emb):
    own_checkpoint(tmp_path / "run", pos_emb=pos_emb)
    with pytest.raises(CheckpointError, match=f"published code has no pos_emb {pos_emb}, so"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


HEAD = {
    "pos_emb": "rotary",
    "activation": "swiglu",
    "intermediate_size": 120,
    "use_bias_in_mlp": False,
    "use_bias_in_attn_linear": False,
    "num_kv_heads": 2,
    "use_qk_layernorm": True,
    "norm": "rmsnorm",
    "rmsnorm_fusion": True,
}
SINCE_2024 = {
    "llama": HEAD,
    "biases": {"pos_emb": "alibi", "num_kv_heads": 2},
    "scalenorm": {"pos_emb": "rotary", "norm": "scalenorm", "use_qk_layernorm": True},
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("case", SINCE_2024)
def test_what_only_gpt_neox_has_is_exported_in_its_format(tmp_path, case, parts):
    """The names and the order of rows are those of gpt-neox's `ParallelSelfAttention` and MLP."""
    config, model = own_checkpoint(tmp_path / "run", **SINCE_2024[case])
    written = export_checkpoint(tmp_path / "run", tmp_path / "out", parts=parts)
    weight = model.layers[1].attention.query_key_value.weight
    heads = weight.view(model.shape.block.num_kv_heads or 4, -1, 8, 32)  # per key head: q..., k, v
    for rank, mine in enumerate(heads.chunk(parts)):
        state = torch.load(written / f"layer_03-model_{rank:02d}-model_states.pt")
        assert "mlp.linear1.weight" in state and not any("4h" in name for name in state)
        assert not any("rotary" in name for name in state)
        rows = [part.reshape(-1, 32) for part in (mine[:, :-2], mine[:, -2], mine[:, -1])]
        if case != "scalenorm":  # else one query head for each key head, side by side
            assert torch.equal(state["attention.query_key_value.weight"], torch.cat(rows))
        if case == "llama":
            scale = model.layers[1].attention.qk_layernorm.scale.view(4, 8).chunk(parts)[rank]
            assert torch.equal(state["attention.qk_layernorm.scale"], scale)
    other = GPT(plan_of(config, VOCAB, device_type="cpu"))
    load_weights(other, Saved(tmp_path / "out", written.name))
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    import_checkpoint(written, tmp_path / "imported", summed_biases=False)
    back = export_checkpoint(tmp_path / "imported", tmp_path / "back")
    for path in written.glob("layer_*"):
        theirs, ours = torch.load(path), torch.load(back / path.name)
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[name], ours[name]) for name in theirs), path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rmsnorm_fusion": False}, "adds rms_norm_epsilon inside the root"),
        ({"norm": "layernorm"}, "takes the mean of use_qk_layernorm over all heads"),
        ({"pos_emb": "kerple_log"}, "gpt-neox has no pos_emb kerple_log"),
        ({"gpt_j_residual": True}, "gpt-neox leaves out attention"),
        ({"activation": "gelu"}, "gpt-neox cannot compute gelu without biases in the MLP"),
        ({"rope_scaling": {"type": "ntk", "factor": 2}}, "published code has no rope_scaling"),
        ({"attention_output_gate": True}, "published code has no attention_output_gate"),
    ],
)
def test_what_gpt_neox_computes_otherwise_is_refused(tmp_path, changes, says):
    own_checkpoint(tmp_path / "run", **HEAD | changes)
    with pytest.raises(CheckpointError, match=says):
        export_checkpoint(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pos_emb": "kerple_log", "theta_per_layer": True}, "no theta_per_layer, so"),
        ({"sliding_window_width": 4}, "no sliding_window_width, so"),
        (HEAD | {"sliding_window_width": [[[4, 2], 1]]}, "no windows of single layers, so"),
        ({"norm": "rmsnorm", "rmsnorm_fusion": True}, "no rmsnorm_fusion, so"),
    ],
)
def test_what_the_published_code_computes_otherwise_is_refused(tmp_path, changes, says):
    own_checkpoint(tmp_path / "run", **changes)
    with pytest.raises(CheckpointError, match=says):
        export_checkpoint(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("name", ["kerple_log", "alibi"])
def test_layers_that_are_named_one_by_one_are_exported_as_one_embedding(tmp_path, name):
    written = []
    for folder, pos_emb in (("a", name), ("b", [[[name], 2]])):
        own_checkpoint(tmp_path / folder, pos_emb=pos_emb)
        path = export_checkpoint(tmp_path / folder, tmp_path / f"{folder} out")
        written.append(torch.load(path / "layer_03-model_00-model_states.pt"))
    assert written[0].keys() == written[1].keys()


def test_key_heads_are_not_cut(tmp_path):
    own_checkpoint(tmp_path / "run", **HEAD)
    with pytest.raises(CheckpointError, match="or the ranks are too many"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", parts=4)
    assert not (tmp_path / "out" / tag_of(5)).exists()


def test_heads_that_cannot_be_told_apart_are_refused(tmp_path):
    own_checkpoint(tmp_path / "run", **HEAD)
    written = export_checkpoint(tmp_path / "run", tmp_path / "out")
    path = written / "mp_rank_00_model_states.pt"
    state = torch.load(path)
    assert state["kerple_run"] == "c0ffee"
    del state["args"]["num_attention_heads"]
    torch.save(state, path)
    path = written / "layer_02-model_00-model_states.pt"
    state = torch.load(path)
    torch.save(state | {"attention.qk_layernorm.weight": torch.ones(4, 8)}, path)
    problems = "\n".join(neox.read(written).problems)
    assert "query_key_value.weight: 64 rows hold no whole number of key heads" in problems
    assert "8 is not the head size, 0" in problems
    assert "gpt-neox takes its mean over all heads of a rank" in problems


def test_a_run_of_several_ranks_is_exported(tmp_path):
    written = export_checkpoint(FIXTURES / "checkpoint" / "run_tp2", tmp_path / "out")
    assert neox.read(written).shape.parts == 2 and not neox.read(written).problems


@pytest.mark.parametrize(("parts", "divisor"), [(1, 16), (2, 24), (3, 16)])
def test_the_vocabulary_is_padded_there_as_it_is_here(tmp_path, parts, divisor):
    """GPT-NeoX computes the padding again and refuses a checkpoint with another one."""
    own_checkpoint(tmp_path / "run", num_attention_heads=6, hidden_size=36)
    written = export_checkpoint(tmp_path / "run", tmp_path / "out", parts=parts)
    args = neox.read(written).args
    assert (args["make_vocab_size_divisible_by"], args["model_parallel_size"]) == (divisor, parts)
    multiple = divisor * parts
    assert all(-(-size // multiple) * multiple == VOCAB for size in (VOCAB - 15, VOCAB))


def test_there_must_be_something_to_export(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "out")


def forged(tmp_path, change):
    """An import of two shards whose record is changed and sealed again."""
    source = newest(MODELS / "tp2_row_gptj_geglu" / "checkpoint").path
    import_checkpoint(source, tmp_path / "ours", summed_biases=True)
    path = newest(tmp_path / "ours").path / "kerple.json"
    record = json.loads(path.read_text())
    del record["checksum"]
    change(record)
    path.write_text(sealed(record))
    return tmp_path / "ours"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r["imported"].pop("shape"), "imported.shape: Field required"),
        (lambda r: r["imported"].pop("args"), "imported.args: Field required"),
        (lambda r: r["imported"].update(shape=True), "imported.shape: Input should be"),
        (lambda r: r["imported"]["shape"].update(num_layers="../x"), "imported.shape.num_layers"),
        (lambda r: r["imported"]["shape"].update(parts=0), "imported.shape.parts"),
        (lambda r: r["imported"]["shape"].update(theta=[]), "but 0 are named: none"),
        (lambda r: r["imported"]["shape"].update(theta=[{}]), "imported.shape.theta.0"),
        (lambda r: r.pop("imported"), "required"),
    ],
)
def test_a_record_that_does_not_describe_its_tensors_is_refused(tmp_path, change, says):
    with pytest.raises((CheckpointError, ConfigError), match=re.escape(says)):
        export_checkpoint(forged(tmp_path, change), tmp_path / "back")


def test_an_import_has_no_optimizer_state_to_reshape(tmp_path):
    with pytest.raises(CheckpointError, match="it holds no optimizer state"):
        reshape(forged(tmp_path, lambda record: None), tmp_path / "out", None, 1)


@pytest.mark.parametrize("content", [[1], {"module": None}, {"module": {"a": 1}}, {}])
def test_a_file_without_tensors_is_named(tmp_path, content):
    shutil.copytree(FIXTURES / "checkpoint" / "run", tmp_path / "run")
    saved = newest(tmp_path / "run")
    torch.save(content, saved.path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states.pt: does not hold tensors"):
        saved.weights()
