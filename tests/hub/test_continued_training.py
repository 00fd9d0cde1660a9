"""Test that training goes on with the weights that were imported or saved, at any length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from megatron.config import load_config
from megatron.engine.build import plan_of
from megatron.engine.checkpoint.exchange import import_checkpoint
from megatron.engine.checkpoint.load_weights import load_weights
from megatron.engine.checkpoint.record import RunDescription
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.errors import CheckpointError
from megatron.engine.job_data import JobData
from megatron.engine.model_shape import identity_of
from megatron.engine.open_run import open_run
from megatron.hub.export import export
from megatron.hub.importing import import_folder
from megatron.model import GPT
from megatron.parallel.groups import build_groups
from tests.helpers.hub import hub_model
from tests.helpers.jobs import BASE, rows, run_job, write_config, write_shards
from tests.helpers.launch import run_ranks
from tests.helpers.paths import FIXTURES

RELEASE = FIXTURES / "parity" / "models" / "kerple_log" / "checkpoint"
TRAINING = ("optimizer", "split", "tokenizer_type", "log_interval")
SHORT = {"train_iters": 2, "train_micro_batch_size_per_gpu": 4, "eval_iters": 0, "save_interval": 1}
TUNED = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "olmo2": ("olmo2", {"num_key_value_heads": 2}),
    "stablelm": ("stablelm", {"num_key_value_heads": 2, "use_parallel_residual": True}),
    "phi": ("phi", {}),
    "gptj": ("gptj", {"rotary_dim": 4}),
    "gpt2": ("gpt2", dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)),
    "opt": ("opt", {"dropout": 0.0}),
}
LENGTHS = {"gptj": 64, "gpt2": 64, "opt": 64}
"""The lengths of models whose position table allows no more."""
LONG = {"finetune": True, "seq_length": 96, "train_iters": 1}


def train(groups, configs):
    for config in configs:
        run_job(groups, config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train with imports and with a branch. Return the folder with a config and run of each."""
    folder = tmp_path_factory.mktemp("continued")
    prefix = write_shards(folder)

    def config_at(name: str, start: dict, **changes) -> Path:
        keys = start | {"data_path": prefix, "save": str(folder / name)} | SHORT | changes
        path = folder / f"{name}.yml"
        path.write_text(yaml.safe_dump(keys))
        return path

    tuned = []
    for name, (kind, changes) in TUNED.items():
        hub_model(kind, **changes).save_pretrained(folder / f"{name}-hub")
        import_folder(folder / f"{name}-hub", folder / f"{name}-imported")
        keys = yaml.safe_load((folder / f"{name}-imported" / "config.yml").read_text())
        keys |= {key: BASE[key] for key in TRAINING} | LONG | {"seq_length": LENGTHS.get(name, 96)}
        tuned.append(config_at(name, keys, load=str(folder / f"{name}-imported")))
    import_checkpoint(RELEASE / "global_step50000", folder / "kerple", summed_biases=False)
    published = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
    published |= {"no_weight_tying": True, "make_vocab_size_divisible_by": 512}
    rotary = {"pos_emb": "rotary", "lr_decay_style": "constant", "warmup": 0}
    decay = {"lr_decay_style": "wsd", "wsd_decay_ratio": 0.5}
    configs = [
        *tuned,
        config_at("longer", BASE | published | LONG, load=str(folder / "kerple"), train_iters=1),
        config_at("stable", BASE | rotary, train_iters=1),
        config_at("branch", BASE | rotary | decay, load=str(folder / "stable" / "global_step1")),
    ]
    run_ranks(1, train, configs)
    return folder


def batch(config, consumed=0):
    """Return the first batch of a run, inputs and targets."""
    data = JobData(config, build_groups(torch.device("cpu")))
    loader = data.training(index_samples=data.wanted["train"], consumed=consumed)
    assert loader is not None
    tokens = torch.from_numpy(next(loader).astype("int64"))
    return tokens[:, :-1], tokens[:, 1:]


def loss_in_transformers(folder, inputs, targets):
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder).eval()(inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


@pytest.mark.parametrize("name", TUNED)
def test_a_model_of_transformers_is_trained_at_a_greater_length(trained, name):
    """The first loss is transformers'. A position table allows no greater length."""
    config = load_config([trained / f"{name}.yml"])
    inputs, targets = batch(config)
    assert hub_model("llama").config.max_position_embeddings == 64
    assert inputs.shape == (4, LENGTHS.get(name, 96))
    wanted = loss_in_transformers(trained / f"{name}-hub", inputs, targets)
    assert rows(trained / name)[1] == pytest.approx(wanted, abs=2e-6)


def test_a_release_is_trained_at_a_greater_length(trained):
    config = load_config([trained / "longer.yml"])
    inputs, targets = batch(config)
    assert inputs.shape == (4, 96)
    model = GPT(plan_of(config, 257, device_type="cpu")).eval()
    load_weights(model, newest(RELEASE))
    with torch.no_grad():
        wanted = model(inputs, targets).mean().item()
    assert rows(trained / "longer")[1] == pytest.approx(wanted, abs=2e-6)


def test_a_branch_begins_with_the_loss_of_the_exported_checkpoint(trained):
    (trained / "exported").mkdir()
    [said, _] = export(
        open_run(trained / "stable", groups=build_groups(torch.device("cpu"))), trained / "exported"
    )
    assert said == "GPTNeoXForCausalLM in float32, without code"
    batch_after_step_1 = batch(load_config([trained / "branch.yml"]), consumed=4)
    wanted = loss_in_transformers(trained / "exported", *batch_after_step_1)
    assert rows(trained / "branch") == {2: pytest.approx(wanted, abs=2e-6)}


def test_only_a_trained_position_table_limits_the_length(tmp_path):
    def run_of(pos_emb, length):
        changes = {"pos_emb": pos_emb, "seq_length": length, "train_batch_size": 1}
        config = load_config([write_config(tmp_path / "c.yml", "text", **changes)])
        shape = plan_of(config, 257, device_type="cpu").shape
        return RunDescription(model=identity_of(config, shape, None))

    saved = newest(FIXTURES / "checkpoint" / "run")
    for pos_emb in ("kerple_log", "rotary + kerple_log", "sinusoidal", "rpe", "none"):
        saved.__dict__["record"] = run_of(pos_emb, 16)
        saved.require_same(run_of(pos_emb, 4096), "model")
    for pos_emb in ("learned", "rotary + learned"):
        saved.__dict__["record"] = run_of(pos_emb, 16)
        text = r"max_position_embeddings \(rows of pos_emb learned\): 16 in the .*, 4096 here"
        with pytest.raises(CheckpointError, match=text):
            saved.require_same(run_of(pos_emb, 4096), "model")
