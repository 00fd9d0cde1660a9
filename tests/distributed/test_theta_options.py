"""Test own start values, an own learning rate and a frozen theta in every layout."""

import pytest
import torch

from megatron.engine.checkpoint.saved_checkpoints import newest
from tests.helpers.jobs import (
    cell,
    digest,
    rows,
    train_run,
    write_shards,
)
from tests.helpers.launch import run_ranks

HEADS_A = [0.2, 0.3, 0.4, 0.5]
OPTIONS = {
    "theta_init": {"bias_p": 1.25, "bias_a": HEADS_A},
    "theta_frozen": ["bias_p"],
    "theta_lr_multiplier": 10.0,
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "eval_iters": 1,
    "save_interval": 3,
}
FROZEN = {"theta_frozen": True, "weight_decay_positional": True, "theta_lr_multiplier": 1.0}
PIPE, TENSOR = {"pipe_parallel_size": 2}, {"model_parallel_size": 2}
LAYOUTS = {
    **{f"zero{stage}": cell(stage, "fp32") for stage in range(4)},
    "zero2-bf16": cell(2, "bf16"),
    "zero0-bf16 wholly": cell(0, "bf16") | FROZEN,
    "zero3 wholly": cell(3, "fp32") | FROZEN,
    "tp2": TENSOR,
    "pp2": PIPE,
    "pp2 wholly": PIPE | FROZEN,
}
LAYERS = {
    "theta_per_layer": True,
    "theta_init": {"layers.0.bias_p": 1.25},
    "theta_frozen": ["layers.0.bias_p"],
}
UNLIKE = {
    "pos_emb": [[["kerple_log", "kerple_power", "kerple_log"], 1]],
    "num_layers": 3,
    "theta_per_layer": True,
    "theta_init": {},
    "theta_frozen": False,
    "train_iters": 1,
}
CHANGES = {"pp2 to one": "pp2", "zero3 to one": "zero3"}


def train(groups, folder, prefix, cells):
    """Train each of `cells`: (run, config keys, run to continue at step 3, or None)."""
    for name, keys, source in cells:
        source = folder / source if source else None
        train_run(groups, folder / name, prefix, OPTIONS | keys, source=source, step=3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    prefix = write_shards(folder)
    whole = [(name, keys, None) for name, keys in LAYOUTS.items()]
    again = [(f"{name} again", keys, name) for name, keys in LAYOUTS.items()]
    run_ranks(2, train, folder, prefix, whole[:7] + again[:7])
    run_ranks(2, train, folder, prefix, whole[7:] + again[7:])
    changes = [(name, {}, source) for name, source in CHANGES.items()]
    one_step = {"train_iters": 1, "warmup": 0.0, "gradient_clipping": 0.0, "theta_frozen": False}
    cells = [("one", {}, None), *changes, ("one step", one_step, None), ("layers", LAYERS, None)]
    cells.append(("unlike", UNLIKE, None))
    run_ranks(1, train, folder, prefix, cells)
    run_ranks(2, train, folder, prefix, [("one to pp2", PIPE, "one")])
    return folder


def theta(run):
    return newest(run).weights()["embedding.theta"].float()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_frozen_parameter_keeps_its_start_value(runs, name):
    p, a = theta(runs / name).unbind(1)
    assert torch.equal(p, torch.full((4,), 1.25))
    start = torch.tensor(HEADS_A)
    if "wholly" in name:
        assert torch.equal(a, start.bfloat16().float() if "bf16" in name else start)
    else:
        assert ((a - start).abs() > 1e-3).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_resuming_is_exact(runs, name):
    assert digest(runs / name) == digest(runs / f"{name} again")


@pytest.mark.parametrize(
    "name", [*(n for n in LAYOUTS if "wholly" not in n), *CHANGES, "one to pp2"]
)
def test_the_layout_changes_nothing(runs, name):
    for metric in ("train/loss", "train/grad_norm", "theta/bias_a_max"):
        ours, expected = rows(runs / name, metric), rows(runs / "one", metric)
        assert ours.keys() == expected.keys()
        tolerance = 2e-2 if "bf16" in name else 1e-5
        for step, value in expected.items():
            assert ours[step] == pytest.approx(value, rel=tolerance, abs=tolerance), (metric, step)


@pytest.mark.parametrize("name", ["zero3", "tp2", "pp2"])
def test_theta_is_logged_per_head(runs, name):
    p, a = theta(runs / name).unbind(1)
    assert rows(runs / name, "theta/bias_p")[6] == p.tolist()
    assert rows(runs / name, "theta/bias_a")[6] == pytest.approx(a.tolist(), rel=1e-6)


def test_each_layers_own_theta_is_logged_per_layer_and_head(runs):
    stored, p = theta(runs / "layers"), rows(runs / "layers", "theta/bias_p")
    assert [len(heads) for heads in p[6]] == [4, 4]
    assert p[6] == stored[:, [0, 2]].T.tolist()
    assert p[6][0] == p[1][0] == [1.25] * 4 and p[6][1] != p[1][1]
    assert rows(runs / "layers", "theta/bias_a")[6] == stored[:, [1, 3]].T.tolist()


def test_parameters_of_unlike_kernels_are_not_logged_as_one(runs):
    stored = theta(runs / "unlike").T.tolist()
    logged = {
        name: rows(runs / "unlike", f"theta/{name}")[1]
        for name in ("kerple_log.bias_a", "kerple_power.bias_a", "kerple_log.bias_p")
    }
    assert logged["kerple_log.bias_a"] == [stored[1], stored[5]]
    assert logged["kerple_power.bias_a"] == stored[3]


def test_theta_moves_by_its_own_learning_rate(runs):
    """The first step of Adam is the learning rate, whatever the gradient."""
    moved = (theta(runs / "one step") - torch.tensor([[1.25, x] for x in HEADS_A])).abs()
    torch.testing.assert_close(moved, torch.full((4, 2), 0.1), rtol=5e-3, atol=0)


@pytest.mark.parametrize("key", ["theta_frozen", "theta_lr_multiplier"])
def test_a_resumed_run_cannot_change_them(runs, tmp_path, key):
    """Adam's moments would still move a theta that is frozen later."""
    changes = {key: True if key == "theta_frozen" else 1.0, "train_iters": 9}
    with pytest.raises(RuntimeError, match=f"a resumed run cannot change {key} .*finetune: true"):
        run_ranks(1, train, tmp_path, str(runs / "text_document"), [("b", changes, runs / "one")])
