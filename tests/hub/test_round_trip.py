"""Test that models keep their tensors, bit for bit, on the way to transformers and back."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatron.data.errors import TokenizerError
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.errors import HubError
from megatron.engine.open_run import open_run
from megatron.hub.config_keys import hub_config, misfits
from megatron.hub.export import export
from megatron.hub.importing import import_folder
from megatron.hub.tokenizer import TEMPLATE, chat_template
from megatron.parallel.groups import build_groups
from tests.helpers.hub import hub_model, write_tokenizer
from tests.hub.test_export_hf import run_of
from tests.hub.test_imported_logits import LLAMA3, YARN

CLASSES = {
    "neox": ("gpt_neox", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
    "neox tied": (
        "gpt_neox",
        {
            "tie_word_embeddings": True,
            "use_parallel_residual": False,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "llama": ("llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "relu"}),
    "llama, large heads": ("llama", {"head_dim": 12}),
    "mistral": ("mistral", {"num_key_value_heads": 1, "sliding_window": 7}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 12}),
    "olmo2": ("olmo2", {"num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "stablelm": ("stablelm", {"num_key_value_heads": 2, "use_qkv_bias": True}),
    "stablelm parallel": ("stablelm", {"num_key_value_heads": 4, "use_parallel_residual": True}),
    "phi": ("phi", {"num_key_value_heads": 2, "partial_rotary_factor": 0.25}),
    "gptj": ("gptj", {"rotary_dim": 4}),
    "gpt2": ("gpt2", {"n_inner": None}),
    "opt": ("opt", {}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, "rope_parameters": YARN}),
}


def same(found, wanted):
    return found.keys() == wanted.keys() and all(
        found[name].dtype == each.dtype and torch.equal(found[name], each)
        for name, each in wanted.items()
    )


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "dtype"),
    list(zip(CLASSES, [torch.float32, torch.bfloat16] * len(CLASSES), strict=False)),
)
def test_a_model_of_transformers_comes_back_as_its_class(name, dtype, tmp_path):
    kind, changes = CLASSES[name]
    first, second = tmp_path / "first", tmp_path / "second"
    model = hub_model(kind, **changes).to(dtype)
    model.save_pretrained(first)
    write_tokenizer(first, normalised=kind.startswith("qwen"))
    import_folder(first, tmp_path / "run")
    second.mkdir()
    said = export(open_run(tmp_path / "run", groups=build_groups(torch.device("cpu"))), second)
    assert said[0].endswith("without code")
    assert not list(second.glob("*.py"))
    assert same(load_file(second / "model.safetensors"), load_file(first / "model.safetensors"))
    model, again = (AutoModelForCausalLM.from_pretrained(each) for each in (first, second))
    assert type(again) is type(model) and again.dtype == model.dtype == dtype
    # transformers' OPT and OLMo 2 have token 1 as padding by default, and never train its vector
    assert again.get_input_embeddings().padding_idx is None
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(1))
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    import_folder(second, tmp_path / "again")
    weights = [newest(tmp_path / run).weights() for run in ("run", "again")]
    assert same(*weights)


RUNS = [
    {"pos_emb": "kerple_log", "no_weight_tying": True, "attention_output_gate": True},
    {"pos_emb": [[["kerple_log + sink", "rpe"], "all"]], "theta_per_layer": True},
    {"pos_emb": "learned", "opt_pos_emb_offset": 2, "norm": "scalenorm", "use_qk_layernorm": True},
    {"pos_emb": "alibi + fire + forget_gate"},
    {"pos_emb": "rotary", "sliding_window_width": 3, "reset_attention_mask": True},
    {"pos_emb": "rotary", "rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
]


@pytest.mark.parametrize(
    ("changes", "dtype"), list(zip(RUNS, [torch.float64, torch.bfloat16] * 3, strict=True))
)
def test_a_run_comes_back(changes, dtype, tmp_path):
    run = run_of(**changes)
    run.model.to(dtype)
    state = {name: each.clone() for name, each in run.model.state_dict().items()}
    (tmp_path / "hub").mkdir()
    [said, _] = export(run, tmp_path / "hub")
    plain = "rope_scaling" in changes
    assert said.endswith("without code") == plain
    import_folder(tmp_path / "hub", tmp_path / "run")
    saved = newest(tmp_path / "run")
    assert same(saved.weights(), state)
    config = saved.record.config
    assert config["tokenizer_type"] == "ByteLevelTokenizer"
    assert plain or json.dumps(config["pos_emb"]) == json.dumps(run.config.model.pos_emb)


def test_a_transformers_class_has_our_logits(tmp_path):
    """Without remote code; `ntk` and the window are written with other numbers."""
    ntk = {"rope_type": "ntk", "factor": 4.0}
    llama = {"norm": "rmsnorm", "rmsnorm_fusion": True, "activation": "geglu", "num_kv_heads": 2}
    plain = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
    for number, (kind, changes) in enumerate(
        [
            (
                "GPTNeoXForCausalLM",
                {"rope_scaling": ntk, "rotary_pct": 0.5, "gpt_j_residual": True},
            ),
            ("GPTNeoXForCausalLM", {"activation": "mish", "no_weight_tying": True}),
            ("LlamaForCausalLM", {**llama, "rope_scaling": ntk}),
            ("MistralForCausalLM", {**llama, **plain, "sliding_window_width": 3}),
        ]
    ):
        run = run_of(pos_emb="rotary", **changes)
        run.model.float()
        folder = tmp_path / str(number)
        folder.mkdir()
        export(run, folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder)
        assert type(theirs).__name__ == kind
        # With a padding index, the vector of the end of a document would never be trained.
        assert theirs.get_input_embeddings().padding_idx is None
        assert theirs.generation_config.pad_token_id == run.tokenizer.eod
        tokens = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            wanted = run.model(tokens)
            torch.testing.assert_close(theirs(tokens).logits, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("given", "longest"), [(256, 256), (2, 6)])
def test_the_longest_text_is_that_of_the_config_or_of_training(tmp_path, given, longest):
    run = run_of(pos_emb="rotary", max_position_embeddings=given)
    run.model.float()  # a class of transformers computes in float64 with rounded angles
    (tmp_path / "hub").mkdir()
    export(run, tmp_path / "hub")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert theirs.config.max_position_embeddings == longest and run.config.model.seq_length == 6


@torch.no_grad()
@pytest.mark.parametrize("pos_emb", ["rotary", "kerple_log"])
def test_the_rounding_error_of_large_logits_is_no_difference(pos_emb, tmp_path):
    """Neighbouring fp32 numbers around 10,000 differ by 1e-3."""
    run = run_of(pos_emb=pos_emb, no_weight_tying=True)
    run.model.output.weight.mul_(1e5)
    tokens = torch.arange(12)[None]
    logits = run.model.float()(tokens)
    assert logits.abs().max() > 1e4
    (tmp_path / "hub").mkdir()
    export(run, tmp_path / "hub")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", trust_remote_code=True)
    torch.testing.assert_close(model(tokens).logits, logits, rtol=0, atol=2e-5 * logits.abs().max())


def test_a_scale_of_distances_comes_back(tmp_path):
    run = run_of(pos_emb="kerple_log", eval_distance_scale=0.25)
    (tmp_path / "hub").mkdir()
    export(run, tmp_path / "hub")
    import_folder(tmp_path / "hub", tmp_path / "run")
    assert newest(tmp_path / "run").record.config["eval_distance_scale"] == 0.25


@pytest.mark.parametrize("normalised", [False, True])
def test_a_qwen2_with_another_tokenizer_is_exported_with_our_code(normalised, tmp_path):
    """transformers loads Qwen's words and normalizer for each Qwen2, whatever the files say."""
    first, second = tmp_path / "first", tmp_path / "second"
    hub_model("qwen2", num_key_value_heads=2).save_pretrained(first)
    write_tokenizer(first, normalised=normalised)
    described = json.loads((first / "tokenizer.json").read_text())
    described["pre_tokenizer"]["add_prefix_space"] = normalised  # a Qwen has no such space
    (first / "tokenizer.json").write_text(json.dumps(described))
    import_folder(first, tmp_path / "run")
    second.mkdir()
    run = open_run(tmp_path / "run", groups=build_groups(torch.device("cpu")))
    assert hub_config(run.config)[0].name == "Qwen2ForCausalLM"
    assert export(run, second)[0].startswith("KerpleForCausalLM")


def test_what_does_not_fit_is_named():
    run = run_of(pos_emb="kerple_log", norm="rmsnorm", gpt_j_residual=True, sliding_window_width=3)
    assert misfits(run.config) == ["norm", "norm_eps", "pos_emb", "sliding_window_width"]
    run = run_of(pos_emb="rotary", num_kv_heads=2, eval_distance_scale=1.0)
    assert misfits(run.config) == ["num_kv_heads"]
    qwen3 = {"norm": "rmsnorm", "rmsnorm_fusion": True, "activation": "swiglu"}
    qwen3 |= {"use_qk_layernorm": True, "qk_layernorm_kind": "shared", "use_bias_in_mlp": False}
    assert hub_config(run_of(pos_emb="rotary", **qwen3).config)[0].name == "Qwen3ForCausalLM"
    gptj = {"gpt_j_residual": True, "gpt_j_tied": True, "no_weight_tying": True}
    gptj |= {"output_layer_bias": True, "use_bias_in_attn_linear": False, "rotary_pct": 0.5}
    assert hub_config(run_of(pos_emb="rotary", **gptj).config)[0].name == "GPTJForCausalLM"
    run = run_of(pos_emb="rotary", rotary_emb_base=500000, **gptj)
    assert misfits(run.config) == ["attention_bias"]  # Phi's; GPT-J's base is always 10000


def test_an_export_of_an_earlier_version_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["KerpleForCausalLM"]}')
    with pytest.raises(HubError, match="kerple_neox is missing, so it cannot be imported"):
        import_folder(tmp_path, tmp_path / "run")


@pytest.mark.parametrize(
    "changes",
    [{"windows": [4, 4]}, {"windows": None}, {"norm_eps": 0.1}, {"rotary_base": 500.0},
     {"num_hidden_layers": 1}, {"tie_word_embeddings": False}, {"pos_emb": ["none", "none"]}],
    ids=str,
)  # fmt: skip
def test_a_change_of_an_export_is_not_ignored(changes, tmp_path):
    run = run_of(pos_emb="rotary + kerple_log", num_layers=2, sliding_window_width=3)
    (tmp_path / "hub").mkdir()
    export(run, tmp_path / "hub")
    AutoConfig.from_pretrained(tmp_path / "hub", trust_remote_code=True, **changes).save_pretrained(
        tmp_path / "hub"
    )
    [name] = changes
    with pytest.raises(HubError, match=f"changed since the export: {name}; change the keys under"):
        import_folder(tmp_path / "hub", tmp_path / "run")


@pytest.mark.parametrize("null", [False, True])
def test_an_export_with_fewer_entries_comes_back(null, tmp_path):
    """The exports of an earlier version had no `head_size`. transformers 4 omits a tied output."""
    run = run_of(pos_emb="kerple_log")
    (tmp_path / "hub").mkdir()
    export(run, tmp_path / "hub")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hub", trust_remote_code=True)
    model.save_pretrained(tmp_path / "hub")
    file = tmp_path / "hub" / "config.json"
    described = json.loads(file.read_text())
    del described["head_size"], described["tie_word_embeddings"]
    file.write_text(json.dumps(described | ({"head_size": None} if null else {})))
    import_folder(tmp_path / "hub", tmp_path / "run")
    assert same(newest(tmp_path / "run").weights(), run.model.state_dict())


@pytest.mark.parametrize(
    ("name", "content"),
    [("chat_template.jinja", b"\xff"), ("tokenizer_config.json", b'{"chat_template": "a"')],
)
def test_a_chat_template_that_cannot_be_read_is_named(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match="tokenizer.json: the chat template beside it cannot"):
        chat_template(str(tmp_path / "tokenizer.json"))
    assert chat_template(None) is chat_template("/dev/null/tokenizer.json") is None


@pytest.mark.parametrize("place", ["file", "config", "list"])
def test_a_chat_template_comes_back(place, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    hub_model("llama").save_pretrained(first)
    write_tokenizer(first)
    template = "{{ bos_token }}{% for each in messages %}<{{ each.role }}>{{ each.content }}"
    template += "{{ eos_token }}{% endfor %}"  # the export has another end, and no begin
    described = {"bos_token": {"content": "!"}, "eos_token": "?", "chat_template": None}
    if place == "file":
        (first / TEMPLATE).write_text(template)
    else:
        named = [{"name": "default", "template": template}]
        described["chat_template"] = template if place == "config" else named
    (first / "tokenizer_config.json").write_text(json.dumps(described))
    import_folder(first, tmp_path / "run")
    second.mkdir()
    export(open_run(tmp_path / "run", groups=build_groups(torch.device("cpu"))), second)
    tokenizer = AutoTokenizer.from_pretrained(second)
    if place == "list":  # several templates, which earlier versions of transformers allowed
        assert tokenizer.chat_template is None
        return
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "!<user>Hi?"
