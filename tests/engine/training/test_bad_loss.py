"""A step with a bad loss stops the run, is skipped, or is passed over from the last checkpoint."""

import contextlib
import io
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.config import ConfigError, load_config
from megatron.config.sections.training import TrainingConfig
from megatron.engine.checkpoint import resume
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.errors import BadLossError, DivergedError
from megatron.engine.run_log.log import RunLog
from megatron.engine.training.bad_loss import LossGuard
from megatron.engine.training.hooks import Step
from megatron.pretraining.run import Job
from tests.helpers.jobs import digest, rewind, rows, tensors_digest, write_config
from tests.helpers.launch import run_ranks
from tests.helpers.shards import write_documents

KEYS = {
    "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 8,
    "eval_iters": 0,
    "save_interval": 1,
    "hidden_dropout": 0.1,
}


def config_at(folder, prefix, **changes):
    save = str(folder / "run")
    return write_config(folder / "c.yml", prefix, **(KEYS | {"save": save, "load": save} | changes))


def run_with_bad_sample(groups, config, numbers, change, **given):
    """Run a job in which these training samples have another loss; return what it prints."""
    job = Job(load_config([config], world_size=groups.world_size), groups, **given)
    loader = job.data.training(index_samples=job.progress.train_samples, consumed=0)
    samples = torch.from_numpy(loader.dataset.batch(numbers))

    def spoil(_model, inputs, losses):
        found = (inputs[0][:, None] == samples[:, :-1]).all(-1).any()
        return change(losses) if found and torch.is_grad_enabled() else losses

    job.model.register_forward_hook(spoil)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        job.run()
    return said.getvalue()


def not_finite(losses):
    return losses * math.nan


def high(losses):
    """A spike with an ordinary gradient."""
    return losses + 100.0


def test_the_loss_is_averaged_over_ranks_once_a_step():
    sums = []
    groups = SimpleNamespace(world_size=2, sum_over_job=lambda loss: sums.append(1) or 2 * loss)
    engine = SimpleNamespace(optimizer=SimpleNamespace(), fp16_enabled=lambda: False)
    training = TrainingConfig(train_iters=3, on_bad_loss="skip", loss_spike_threshold=1.0)
    guard = LossGuard(engine, groups, training, RunLog(None, is_main=False))
    for loss, spoiled, problem in ((2.0, False, ""), (9.0, True, "rose from 2"), (2.0, False, "")):
        sums.clear()
        loss = torch.tensor(loss)
        assert guard.changed_loss(loss, loss).isnan() == spoiled
        assert problem in guard.judge(loss, 1.0) and len(sums) == 1


def guard_of(ranks_sum=lambda loss: loss, world_size=1, is_main=False, **keys):
    groups = SimpleNamespace(
        world_size=world_size, sum_over_job=ranks_sum, device=torch.device("cpu")
    )
    engine = SimpleNamespace(optimizer=SimpleNamespace(), was_step_applied=lambda: True)
    training = TrainingConfig(train_iters=3, **keys)
    return LossGuard(engine, groups, training, RunLog(None, is_main=is_main))


def test_the_average_keeps_nine_tenths_of_the_earlier_losses():
    """After losses 2, 3 and 1: 0.9 (0.9 2 + 0.1 3) + 0.1 1 = 1.99."""
    guard = guard_of(loss_spike_threshold=1.5)
    for loss in (2.0, 3.0, 1.0):
        assert guard.judge(torch.tensor(loss), 1.0) == ""
    assert guard.state() == {"average_loss": pytest.approx(1.99)}
    assert guard.judge(torch.tensor(3.48), 1.0) == ""
    assert guard.state() == {"average_loss": pytest.approx(0.9 * 1.99 + 0.348)}  # 2.139
    assert guard.judge(torch.tensor(3.65), 1.0) == "the loss rose from 2.1390 to 3.6500"
    assert guard.state() == {"average_loss": pytest.approx(2.139)}  # without the spike


def test_the_spike_is_one_of_the_mean_over_ranks():
    """The other three ranks have losses of 6 in all; the mean rises from 2 to 2.9, the sum by 3."""
    guard = guard_of(lambda loss: loss + 6.0, world_size=4, loss_spike_threshold=1.0)
    assert guard.judge(torch.tensor(2.0), 1.0) == ""
    assert guard.judge(torch.tensor(5.6), 1.0) == ""
    assert guard.state() == {"average_loss": pytest.approx(0.9 * 2.0 + 0.1 * 2.9)}
    assert guard.judge(torch.tensor(6.5), 1.0) == "the loss rose from 2.0900 to 3.1250"


def test_the_tenth_bad_step_in_a_row_ends_the_run():
    guard = guard_of(on_bad_loss="skip")
    for loss in [math.nan] * 9 + [1.0] + [math.nan] * 9:
        assert bool(guard.judge(torch.tensor(loss), 1.0)) == math.isnan(loss)
    with pytest.raises(DivergedError, match="^the loss is nan, after 9 skipped steps"):
        guard.judge(torch.tensor(math.nan), 1.0)


def test_a_skipped_step_is_not_good_and_the_next_one_is(capsys):
    guard = guard_of(on_bad_loss="skip", is_main=True)
    flags = dict.fromkeys(("last", "leaves", "logs", "validates", "saves"), False)
    for number, loss in ((1, 3.0), (2, math.inf), (3, 3.0)):
        loss = torch.tensor(loss)
        assert guard.changed_loss(loss, loss).isnan() == (number == 2)
        step = Step(number, 0.1, loss, 1.0, 8 * number, 8, **flags)
        guard.after_step(step)
        assert step.good == (number != 2)
    said = capsys.readouterr().out
    assert said == (
        "  the loss is inf at step 2, samples 8 to 15 of the split train: its update is skipped\n"
    )


def test_an_update_that_deepspeed_skips_does_not_count_in_averages():
    """With fp16, DeepSpeed skips updates while it searches its loss scale."""
    guard = guard_of(precision="fp16", loss_scale=0)
    flags = dict.fromkeys(("last", "leaves", "logs", "validates", "saves"), False)
    for number, applied in ((1, False), (2, True)):
        guard.engine.was_step_applied = lambda applied=applied: applied
        step = Step(number, 0.1, torch.tensor(math.nan), math.inf, 8 * number, 8, **flags)
        guard.after_step(step)
        assert step.good == applied


def several(groups, cells):
    return [run_with_bad_sample(groups, *cell) for cell in cells]


def test_a_skipped_step_changes_nothing_but_the_counters(tmp_path, prefix):
    cells = [(1, False, high), (2, True, not_finite), (3, False, high)]
    configs = [
        config_at(
            tmp_path / str(stage), prefix, on_bad_loss="skip", loss_spike_threshold=20,
            zero_optimization={"stage": stage}, bf16={"enabled": bf16},
        )
        for stage, bf16, _ in cells
    ]  # fmt: skip
    jobs = [(config, [17], change) for config, (_, _, change) in zip(configs, cells, strict=True)]
    said, _ = run_ranks(2, several, jobs)
    for (stage, _, change), text in zip(cells, said, strict=True):
        run = tmp_path / str(stage) / "run"
        what = "the loss is nan" if change is not_finite else "the loss rose from"
        assert f"  {what}" in text
        assert "at step 3, samples 16 to 23 of the split train: its update is skipped" in text
        states = {
            step: [tensors_digest(p) for p in sorted((run / f"global_step{step}").glob("*optim*"))]
            for step in (2, 3, 4)
        }
        assert len(states[2]) == 2 and states[2] == states[3], stage
        assert all(a != b for a, b in zip(states[3], states[4], strict=True))
        rates = rows(run, "train/lr")
        assert rates[4] == rates[3] != rates[5]
        assert set(rows(run)) == {1, 2, 3, 4, 5, 6} and rows(run)[3] is None


def without_spare_samples(folder):
    """Return keys of two texts that last for 64 samples: one corpus, and a blend of two."""
    rng, made = np.random.default_rng(8), []
    for name in ("one", "two"):
        made.append(str(folder / name))
        write_documents(made[-1], rng.integers(97, 123, (41, 25)))
    alone = {"data_path": made[0], "split": "1,0,0"}  # 1,025 tokens: 64 samples of 16 and one
    kinds = ("train", "valid", "test")
    blend = {f"{kind}_data_paths": made if kind == "train" else made[:1] for kind in kinds}
    return [alone, blend | {"data_path": None, "train_data_weights": [0.7, 0.3]}]


@pytest.mark.parametrize("text", ["with spare samples", "to its last sample", "blend"])
def test_going_back_passes_over_the_samples_and_is_the_same_after_a_restart(tmp_path, prefix, text):
    keys = {"on_bad_loss": "roll_back", "save_interval": 2, "train_iters": 8}
    alone, blend = without_spare_samples(tmp_path)
    keys |= {"to its last sample": alone, "blend": blend}.get(text, {})
    config = config_at(tmp_path, prefix, **keys)
    run = tmp_path / "run"
    said, _ = run_ranks(2, run_with_bad_sample, config, [41], not_finite)
    assert "the loss is nan at step 6, samples 40 to 47 of the split train" in said
    assert (
        f"back to {run}/global_step4 (1 of at most 3 times), passing over the samples 32 to 47"
        in said
    )
    assert list(rows(run)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert newest(run).record.progress.consumed_samples == 8 * 8 + 16
    for step in (4, 6):  # before the bad sample, and after it
        again = tmp_path / f"again{step}" / "run"
        again.parent.mkdir()
        rewind(run, again, step)
        other = config_at(again.parent, prefix, **keys)
        run_ranks(2, run_with_bad_sample, other, [41], not_finite)
        assert digest(again) == digest(run) and rows(again) == rows(run)


def goes_back_behind_damage(groups, config, run):
    newest_files = sorted((run / "global_step4").glob("*optim*"))
    newest_files[0].write_bytes(newest_files[0].read_bytes()[:-64] + bytes(64))
    with mock.patch.object(resume, "set_aside_later"):  # as if it is damaged from now on
        return run_with_bad_sample(groups, config, [17], not_finite, allow_fallback=True)


def test_going_back_passes_over_a_damaged_checkpoint(tmp_path, prefix):
    """`latest` names the damaged one, which would be a later step, until the run saves again."""
    keys = {"on_bad_loss": "roll_back", "save_interval": 2, "train_iters": 4}
    run_ranks(1, run_with_bad_sample, config_at(tmp_path, prefix, **keys), [], not_finite)
    run = tmp_path / "run"
    config = config_at(tmp_path, prefix, **keys | {"train_iters": 6})
    [said] = run_ranks(1, goes_back_behind_damage, config, run)
    assert f"back to {run}/global_step2 (1 of at most 3 times)" in said
    assert said.count("its checksum is wrong") == 2  # at the start, and when the run goes back
    assert newest(run).tag == "global_step6"


def stops(groups, folder, prefix):
    config = config_at(folder, prefix, loss_spike_threshold=20)
    with pytest.raises(BadLossError) as spike:
        run_with_bad_sample(groups, config, [17], high)
    assert newest(folder / "run").tag == "global_step2"
    warned = run_with_bad_sample(groups, config_at(folder / "b", prefix), [17], high)
    keys = {"on_bad_loss": "roll_back", "save_interval": None}
    with pytest.raises(BadLossError) as unsaved:
        run_with_bad_sample(groups, config_at(folder / "c", prefix, **keys), [17], not_finite)
    config = config_at(folder / "d", prefix, on_bad_loss="skip", train_iters=12)
    with pytest.raises(DivergedError, match="after 9 skipped steps"):
        run_with_bad_sample(groups, config, range(96), not_finite)
    return str(spike.value), warned, str(unsaved.value)


def names_what_is_saved(groups, folder, prefix):
    texts = []
    for name, interval in (("a", 2), ("b", None)):
        config = config_at(folder / name, prefix, loss_spike_threshold=20, save_interval=interval)
        with pytest.raises(BadLossError) as bad:
            run_with_bad_sample(groups, config, [17], high)
        texts.append(str(bad.value))
    return texts


def test_the_error_names_the_newest_checkpoint_only_where_there_is_one(tmp_path, prefix):
    [(saved, unsaved)] = run_ranks(1, names_what_is_saved, tmp_path, prefix)
    assert saved.endswith(f". The newest checkpoint is {tmp_path}/a/run/global_step2")
    assert unsaved.endswith(". No checkpoint yet") and "untouched" not in unsaved


def test_a_spike_stops_at_the_threshold_and_is_told_without_one(tmp_path, prefix):
    [(spike, warned, unsaved)] = run_ranks(1, stops, tmp_path, prefix)
    assert "the loss rose from" in spike and "at step 3, samples 16 to 23" in spike
    assert "  the loss rose from" in warned and "loss_spike_threshold and on_bad_loss" in warned
    assert "the loss is nan at step 3" in unsaved


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"zero_optimization": {"stage": 0}}, "stage 0: the optimizer there"),
        ({"pipe_parallel_size": 2}, "pipe_parallel_size 2: only the last stage"),
        ({"fp16": {"enabled": True}}, "fp16: its loss scale skips"),
        ({"on_bad_loss": "roll_back", "save": None}, "write save: FOLDER"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, prefix, changes, says):
    config = config_at(tmp_path, prefix, **({"on_bad_loss": "skip"} | changes))
    with pytest.raises(ConfigError) as error:
        load_config([config], world_size=2)
    assert says in str(error.value)
