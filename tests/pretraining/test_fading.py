"""Test runs whose rotary embedding fades out during the first steps."""

from __future__ import annotations

import pytest
import torch

from megatron import preemption
from megatron.config import ConfigError, load_config
from megatron.engine.build import plan_of
from megatron.engine.errors import CheckpointError
from megatron.engine.open_run import open_run
from megatron.model import GPT
from tests.helpers.jobs import rows, run_job, write_config, write_shards
from tests.helpers.launch import run_ranks
from tests.hub.test_continued_training import batch
from tests.pretraining.test_retrofit import SIZES, keys_of, theta, weights

FADE = {"retrofit_anneal": 4, "pos_emb": "kerple_log", "warmup": 0.0}
FADE |= {"lr_decay_style": "constant", "train_iters": 6}
FADE |= {"optimizer": {"type": "SGD", "params": {"lr": 1e-30}}, "weight_decay": 0.0}
VALIDATES = {"eval_interval": 2, "eval_iters": 1}


def fade(groups, folder, prefix):
    def start(name, keys):
        path = folder / f"{name}.yml"
        run_job(groups, write_config(path, prefix, **keys | {"save": str(folder / name)}))

    start("rotary", keys_of(folder, "rotary"))
    keys = keys_of(folder, "none") | FADE
    start("fade", keys)
    keys |= {"optimizer": {"type": "Adam", "params": {"lr": 0.01}}} | VALIDATES
    start("whole", keys)
    with pytest.MonkeyPatch.context() as patch:  # ends at step 2, before the validation
        patch.setattr(
            preemption.Preemption, "due", lambda _: (folder / "broken" / "global_step1").exists()
        )
        start("broken", keys | {"extra_save_iters": [1]})
    for wrong in (0, 5):
        with pytest.raises(CheckpointError) as error:
            start("broken", keys | {"retrofit_anneal": wrong})
        assert f"with retrofit_anneal: 4, and the config says {wrong}; write" in str(error.value)
    for _ in range(2):
        start("broken", keys | {"exit_interval": 3})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fading")
    run_ranks(1, fade, folder, write_shards(folder))
    return folder


def test_each_step_has_the_angles_of_position_interpolation(folder):
    """The weights do not move here. Fading by f is position interpolation by the factor 1 / f."""
    stored = weights(folder, "fade")
    for step, factor in enumerate([1.0, 4 / 3, 2.0, 4.0, None, None]):
        keys = {"pos_emb": "rotary + kerple_log"}
        if factor is None:
            keys = {"pos_emb": "kerple_log"}
        elif factor > 1:
            keys["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        changes = keys | SIZES | {"attention_backend": "eager", "train_iters": 6}
        path = write_config(folder / "reference.yml", str(folder / "text_document"), **changes)
        model = GPT(plan_of(load_config([path]), 257, device_type="cpu")).double().eval()
        model.load_state_dict(stored)
        with torch.no_grad():
            wanted = model(*batch(load_config([path]), consumed=4 * step)).mean().item()
        assert rows(folder / "fade")[step + 1] == pytest.approx(wanted, abs=2e-6)


def test_a_resumed_run_goes_on_where_the_positions_were(folder):
    """The first job left before the validation of step 2, and the next made up for it."""
    assert rows(folder / "broken") == rows(folder / "whole")
    losses = [rows(folder / name, "validation/loss") for name in ("broken", "whole")]
    assert losses[0] == losses[1] and set(losses[0]) == {2, 4, 6}
    assert torch.equal(theta(folder, "broken"), theta(folder, "whole"))
    half = folder / "broken"
    (half / "latest").write_text("global_step3")
    assert any("step 3 of retrofit_anneal 4" in note for note in open_run(half).notes)


def test_the_last_step_has_no_old_positions(tmp_path):
    keys = {"finetune": True, "load": "a", "retrofit_anneal": 6, "train_iters": 6}
    with pytest.raises(ConfigError, match="retrofit_anneal: 6 with train_iters 6: .* below train_"):
        load_config([write_config(tmp_path / "c.yml", "text", **keys)])
