"""Test runs that start from a trained model with other positions."""

from __future__ import annotations

from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.config import ConfigError, load_config
from megatron.engine.build import plan_of
from megatron.engine.checkpoint.exchange import import_checkpoint
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.errors import CheckpointError
from megatron.engine.open_run import open_run
from megatron.hub.export import export
from megatron.hub.importing import import_folder
from megatron.model import GPT
from megatron.positional import PositionalError
from megatron.pretraining import retrofit
from tests.helpers.hub import hub_model
from tests.helpers.jobs import rows, run_job, write_config, write_shards
from tests.helpers.launch import run_ranks
from tests.helpers.paths import FIXTURES
from tests.hub.test_continued_training import batch

RELEASE = FIXTURES / "parity" / "models" / "kerple_log" / "checkpoint" / "global_step50000"
SIZES = {"init_method_std": 0.4, "train_micro_batch_size_per_gpu": 4, "eval_iters": 0}
STILL = {"train_iters": 1}  # the learning rate of step 1 is 0: its checkpoint has the first weights
LAYERS = [[["rotary", "rotary + kerple_log"], 1]]
STARTS = {"kerple_log.bias_p": [0.1, 0.2, 0.3, 0.4]}
# name: (the run that it starts from, or None; config keys)
RUNS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "rotary": (None, {"pos_emb": "rotary", "train_iters": 2}),
    "both": ("rotary", {"pos_emb": "rotary + kerple_log"}),
    "given": ("rotary", {"pos_emb": "rotary + kerple_log", "theta_init": STARTS}),
    "drawn": ("rotary", {"pos_emb": "rotary + kerple_log", "retrofit_init": "drawn"}),
    "none": ("rotary", {"pos_emb": "none"}),
    "alibi": ("rotary", {"pos_emb": "alibi"}),
    "learned": ("rotary", {"pos_emb": "learned"}),
    "gates": ("rotary", {"pos_emb": "rotary + forget_gate + fire"}),
    "layers": ("rotary", {"pos_emb": LAYERS}),
    "window": ("rotary", {"pos_emb": "rotary", "sliding_window_width": 4}),
    "scaled": ("rotary", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "kept": ("both", {"pos_emb": "kerple_log"}),
    "own": ("kept", {"pos_emb": "kerple_log + alibi", "theta_per_layer": True}),
    "fewer": ("layers", {"pos_emb": "rotary"}),
    "tableless": ("learned", {"pos_emb": "rotary"}),
    "gateless": ("gates", {"pos_emb": "rotary + rpe", "theta_init": {}}),
    "again": ("own", {"pos_emb": "kerple_log + alibi", "theta_per_layer": True}),
}


def keys_of(folder: Path, name: str) -> dict[str, Any]:
    source, keys = RUNS[name]
    start = {"load": str(folder / source), "finetune": True} if source else {}
    pos_emb = {"pos_emb": "rotary"}  # of a run that names no other
    return SIZES | STILL | pos_emb | keys | start | {"save": str(folder / name)}


def train(groups, folder, prefix, names):
    for name in names:
        with (folder / f"{name}.log").open("w") as log, redirect_stdout(log):
            run_job(groups, write_config(folder / f"{name}.yml", prefix, **keys_of(folder, name)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("retrofit")
    run_ranks(1, train, folder, write_shards(folder), list(RUNS))
    return folder


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return newest(folder / name).weights()


def theta(folder: Path, name: str) -> torch.Tensor:
    return weights(folder, name)["embedding.theta"]


def of_positions(name: str) -> bool:
    return "theta" in name or "position_embeddings" in name or "attention.gate" in name


@pytest.mark.parametrize("name", [name for name in RUNS if name != "rotary"])
def test_every_weight_that_both_models_have_is_equal_to_the_last_bit(folder, name):
    before, after = weights(folder, RUNS[name][0] or ""), weights(folder, name)
    shared = [key for key in before if not of_positions(key)]
    assert len(shared) == 27 and shared == [key for key in after if not of_positions(key)]
    for key in shared:
        assert torch.equal(before[key], after[key]), key


@pytest.mark.parametrize("name", [name for name in RUNS if name != "rotary"])
def test_the_first_loss_is_that_of_a_model_with_these_weights(folder, name):
    """The reference is built without `load_weights`, and computes in float64 by the formula."""
    config = load_config([folder / f"{name}.yml"], ["attention_backend=eager"])
    model = GPT(plan_of(config, 257, device_type="cpu")).double().eval()
    stored = torch.load(newest(folder / name).path / "mp_rank_00_model_states.pt")["module"]
    model.load_state_dict(stored, strict=True)
    with torch.no_grad():
        wanted = model(*batch(config)).mean().item()
    assert rows(folder / name)[1] == pytest.approx(wanted, abs=2e-6)
    text = (folder / f"{name}.log").read_text()
    if name == "again":  # the same positions
        assert "positions:" not in text
        return
    assert f"as the checkpoint was trained, {wanted:.4f} now" in text
    old = load_config([folder / f"{RUNS[name][0]}.yml"], ["attention_backend=eager"])
    model = GPT(plan_of(old, 257, device_type="cpu")).double().eval()
    model.load_state_dict(weights(folder, RUNS[name][0] or ""))
    with torch.no_grad():
        assert f"tokens: {model(*batch(config)).mean():.4f} as the checkpoint" in text


def test_a_model_without_positions_drops_them(folder):
    assert not [name for name in weights(folder, "none") if of_positions(name)]
    assert not [name for name in weights(folder, "fewer") if of_positions(name)]
    assert not [name for name in weights(folder, "tableless") if of_positions(name)]
    assert list(filter(of_positions, weights(folder, "gateless"))) == ["embedding.theta"]


def test_new_columns_of_theta_start_as_they_are_said_to(folder):
    assert theta(folder, "both").unique().tolist() == pytest.approx([0.05, 0.5])
    assert torch.equal(theta(folder, "both")[:, 0], torch.full((4,), 0.5))
    given = torch.tensor(STARTS["kerple_log.bias_p"])
    assert torch.equal(theta(folder, "given"), torch.stack([given, torch.full((4,), 0.05)], 1))
    config = load_config([folder / "drawn.yml"])
    model = GPT(plan_of(config, 257, device_type="cpu"))
    assert model.theta is not None and torch.equal(theta(folder, "drawn"), model.theta)
    assert torch.equal(theta(folder, "gateless"), torch.zeros(4, 32))
    gates = weights(folder, "gates")
    assert torch.equal(gates["embedding.theta"], torch.zeros(4, 32))  # FIRE's output layer
    for layer in range(2):
        gate = gates[f"layers.{layer}.attention.gate.bias"].sigmoid()
        assert gate.tolist() == pytest.approx([16 / 17] * 4)
    assert not weights(folder, "learned")["embedding.position_embeddings.weight"].any()


def test_columns_that_both_models_have_are_kept_under_any_name(folder):
    assert torch.equal(theta(folder, "kept"), theta(folder, "both"))
    assert torch.equal(theta(folder, "own"), theta(folder, "both").repeat(1, 2))


def test_the_log_names_what_changed(folder):
    text = (folder / "layers.log").read_text()
    assert "positions: rotary -> rotary, rotary + kerple_log\n  kept: rotary, and all" in text
    start = "kerple_log.bias_p = 0.5, kerple_log.bias_a = 0.05"
    assert (
        f"  added: kerple_log in 1 of 2 layers (theta starts: {start})\n  dropped: no term" in text
    )
    text = (folder / "scaled.log").read_text()
    assert "kept: no term, and all other weights\n  added: rotary\n  dropped: rotary\n" in text
    assert "  sliding_window_width: None -> 4\n" in (folder / "window.log").read_text()
    assert "added: no term\n  dropped: rotary\n" in (folder / "none.log").read_text()


def test_the_result_is_a_run_like_any_other(folder):
    run = open_run(folder / "given")
    assert run.model.theta is not None and torch.equal(run.model.theta, theta(folder, "given"))
    with pytest.raises(CheckpointError, match="pos_emb: 'rotary' in the checkpoint, 'none' here"):
        open_run(folder / "rotary", load_config([folder / "none.yml"]))


@pytest.mark.parametrize("name", ["both", "none", "gates", "layers", "own", "window", "scaled"])
def test_an_export_has_the_new_positions(folder, tmp_path_factory, monkeypatch, name):
    """transformers gives the run's logits at four times the training length."""
    modules, made = (tmp_path_factory.mktemp(each) for each in ("modules", "export"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    run = open_run(folder / name)
    export(run, made)
    model = AutoModelForCausalLM.from_pretrained(made, trust_remote_code=True).eval()
    inputs = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found, expected, source = (
            model(inputs).logits, run.model(inputs), open_run(folder / "rotary").model(inputs)
        )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    assert (found - source).abs().max() > 1e-2


def attempt(groups, folder, configs):
    """Start these runs, which must be refused, and return their errors."""
    errors = []
    for config in configs:
        with pytest.raises((CheckpointError, PositionalError)) as error:
            run_job(groups, config)
        errors.append(str(error.value))
    return errors


REFUSED = {
    "hidden_size: 32 in the checkpoint, 64 here": {"hidden_size": 64},
    "num_layers: 2 in the checkpoint, 3 here": {"num_layers": 3},
    "vocab_size: 264 in the checkpoint, 320 here": {"make_vocab_size_divisible_by": 64},
    "rotary_pct: 1.0 in the checkpoint, 0.5 here": {
        "pos_emb": "rotary + alibi",
        "rotary_pct": 0.5,
    },
    "not rotary -> rotary + kerple_log; write": {
        "pos_emb": "rotary + kerple_log",
        "retrofit_init": "fit",
    },
    "not rotary -> forget_gate; write": {"pos_emb": "forget_gate", "retrofit_init": "fit"},
    "pos_emb drops: ": {"pos_emb": "rotary + alibi", "retrofit_anneal": 2, "train_iters": 3},
    "with this config's rotary_pct": {
        "rotary_emb_base": 500.0,
        "retrofit_anneal": 2,
        "train_iters": 3,
    },
}


def test_models_that_differ_in_more_are_refused_by_name(folder, tmp_path):
    prefix = str(folder / "text_document")
    keys = keys_of(folder, "none") | {"save": str(tmp_path / "run")}
    configs = [
        write_config(tmp_path / f"{number}.yml", prefix, **keys | changes)
        for number, changes in enumerate(REFUSED.values())
    ]
    configs.append(write_config(tmp_path / "unnamed.yml", prefix, **keys))
    lines = configs[-1].read_text().splitlines()  # without pos_emb, whose default is another one
    configs[-1].write_text("\n".join(line for line in lines if not line.startswith("pos_emb:")))
    expected = [*REFUSED, "was trained with pos_emb: rotary, and the config names no pos_emb"]
    keys |= {"load": str(folder / "window"), "pos_emb": "rotary"}
    configs.append(write_config(tmp_path / "windowless.yml", prefix, **keys))
    expected.append("sliding_window_width: 4, and the config names no sliding_window_width; write")
    for error, wanted in zip(run_ranks(1, attempt, folder, configs)[0], expected, strict=True):
        assert wanted in error


def test_the_keys_need_loaded_weights(tmp_path):
    for key, value in (("retrofit_anneal", 3), ("retrofit_init", "fit")):
        with pytest.raises(ConfigError, match=f"{key}: changes positions .* finetune: true"):
            load_config([write_config(tmp_path / "c.yml", "text", **{key: value})])
    keys = {"finetune": True, "load": "a", "retrofit_anneal": 3, "torch_compile": True}
    with pytest.raises(ConfigError, match="retrofit_anneal: 3 with torch_compile"):
        load_config([write_config(tmp_path / "c.yml", "text", **keys)])


def train_too_large(groups, folder, configs):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrofit, "MOST_ON_CPU", 1)
        train_all(groups, folder, configs)


def test_a_large_model_is_not_compared_on_a_cpu_unless_it_is_fitted(folder, tmp_path):
    prefix, both = str(folder / "text_document"), keys_of(folder, "both")
    configs = []
    for name in ("gentle", "fit"):
        keys = {"retrofit_init": name, "save": str(tmp_path / name), "pos_emb": "kerple_log"}
        configs.append(write_config(tmp_path / f"{name}.yml", prefix, **both | keys))
    run_ranks(1, train_too_large, tmp_path, configs)
    gentle, fit = ((tmp_path / f"{name}.log").read_text() for name in ("gentle", "fit"))
    assert "loss not compared: it takes more than" in gentle and "as the checkpoint" not in gentle
    assert "loss on the first 1 samples" in fit and "  fitted bias_p: " in fit


def train_all(groups, folder, configs):
    for config in configs:
        with config.with_suffix(".log").open("w") as log, redirect_stdout(log):
            run_job(groups, config)


def test_imports_get_new_positions(folder, tmp_path):
    """Imports of transformers and of GPT-NeoX, and a release of GPT-NeoX itself."""
    hub_model("llama", num_key_value_heads=2).save_pretrained(tmp_path / "hub")
    import_folder(tmp_path / "hub", tmp_path / "llama")
    import_checkpoint(RELEASE, tmp_path / "imported", summed_biases=False)
    prefix = str(folder / "text_document")
    llama = load_config([tmp_path / "llama" / "config.yml"]).to_flat_dict()
    sizes = {key: llama[key] for key in llama if key.startswith(("num_", "use_", "inter", "rms"))}
    sizes |= {key: llama[key] for key in ("hidden_size", "norm", "activation", "no_weight_tying")}
    sizes |= {"make_vocab_size_divisible_by": 300, "pos_emb": "none"}
    neox = {"num_layers": 3, "hidden_size": 64, "no_weight_tying": True}
    neox |= {"make_vocab_size_divisible_by": 512, "pos_emb": "kerple_log + alibi"}
    starts = {"llama": (tmp_path / "llama", sizes), "imported": (tmp_path / "imported", neox)}
    starts["release"] = (RELEASE, neox)
    configs = []
    for name, (load, keys) in starts.items():
        keys |= SIZES | STILL | {"load": str(load), "finetune": True, "warmup": 0.5}
        keys |= {"save": str(tmp_path / f"tuned_{name}")}
        configs.append(write_config(tmp_path / f"{name}.yml", prefix, **keys))
    run_ranks(1, train_all, tmp_path, configs)
    theta_HN = newest(tmp_path / "imported").weights()["embedding.theta"]
    for name in ("imported", "release"):
        tuned = newest(tmp_path / f"tuned_{name}").weights()
        assert torch.equal(tuned["embedding.theta"], theta_HN)
        text = (tmp_path / f"{name}.log").read_text()
        assert "kept: kerple_log, and all" in text and "added: alibi" in text
    text = (tmp_path / "llama.log").read_text()
    assert "positions: rotary -> none" in text
    before = newest(tmp_path / "llama").weights()
    after = newest(tmp_path / "tuned_llama").weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
