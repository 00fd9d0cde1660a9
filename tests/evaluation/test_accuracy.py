"""Test the accuracy on length tasks, and a run on a task: training, resuming, evaluation.

The two processes of the run also measure the suite, because starting processes takes long.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from megatron.config import ConfigError, load_config
from megatron.data.errors import TaskError
from megatron.data.samples.loader import TrainLoader
from megatron.data.tasks.registry import build_task
from megatron.data.tasks.samples import TaskSamples, examples_at
from megatron.engine.build import plan_of
from megatron.engine.checkpoint.saved_checkpoints import newest
from megatron.engine.job_data import JobData
from megatron.engine.training.batches import next_batches
from megatron.engine.training.pipeline_engine import PipelineLosses
from megatron.evaluation.accuracy import accuracy_at, evaluate_task
from megatron.evaluation.by_length import evaluate_checkpoint
from megatron.evaluation.losses import MeasuredModel
from megatron.evaluation.suite.all_measures import measure_with_progress
from megatron.evaluation.suite.measure import Subject
from megatron.model import GPT
from megatron.parallel.groups import Groups, build_groups
from megatron.parallel.loss import UNCOUNTED, inputs_and_targets, mean_loss
from tests.evaluation.suite.test_suite import SAMPLE, Letters, induction_model
from tests.helpers.jobs import all_but_speed, digest, rows, train_run, write_config
from tests.helpers.launch import run_ranks

GROUPS = build_groups(torch.device("cpu"))
COPY = build_task("copy", {"max_length": 4})
KEYS = {
    "tokenizer_type": "TaskTokenizer",
    "task_options": {"max_length": 4},
    "eval_lengths": [4, 8],
    "eval_examples": 40,
    "train_micro_batch_size_per_gpu": 4,
}


def solver(spoilt: tuple[int, ...] = (), spoilt_from: int = 0):
    """Return a model of `copy` that is always right, except at answers `spoilt` of long rows."""

    def logits(tokens_BT: torch.Tensor) -> torch.Tensor:
        length = tokens_BT.shape[1] // 2
        assert (tokens_BT >= 0).all()  # the model reads ids, not their complements
        found = F.one_hot(F.pad(tokens_BT, (length, 0))[:, : tokens_BT.shape[1]], 16).float()
        for answer in spoilt if length >= spoilt_from else ():
            found[:, length + answer] = F.one_hot(torch.tensor(15), 16).float()
        return found

    return logits


def test_a_perfect_model_is_perfect_and_a_broken_one_is_not():
    perfect = accuracy_at(solver(), COPY, 6, 50, GROUPS, 64)
    assert (perfect.exact, perfect.token, perfect.examples) == (1.0, 1.0, 50)
    assert perfect.exact_low == pytest.approx(0.92865, abs=1e-5)  # 50 / (50 + 1.959964^2)
    assert perfect.exact_high == 1.0 and perfect.times_train == 1.5
    broken = accuracy_at(solver((0,)), COPY, 6, 50, GROUPS, 64)
    assert (broken.exact, broken.exact_low) == (0.0, 0.0)
    assert broken.token == pytest.approx(5 / 6)


def test_one_mistake_in_one_example_counts_once():
    hit = examples_at(COPY, 6, 50)[17, :6]

    def logits(tokens_BT: torch.Tensor) -> torch.Tensor:
        found = solver()(tokens_BT)
        same_B = (tokens_BT[:, :6] == torch.from_numpy(~hit)).all(1)
        found[same_B, 8] = 0.0  # the most likely token is then 0, the end
        return found

    result = accuracy_at(logits, COPY, 6, 50, GROUPS, 7)
    assert (result.exact, result.token) == (49 / 50, pytest.approx(299 / 300))


def test_mistakes_are_counted_from_shares_that_are_not_exact():
    """Of 98 targets, the one mistake of each row is a share whose 98-fold is below 1 in float64."""
    assert 98 * (1 / 98) < 1
    found = accuracy_at(solver((7,)), COPY, 49, 3, GROUPS, 1000)
    assert (found.exact, found.token) == (0.0, pytest.approx(48 / 49))
    assert accuracy_at(solver(tuple(range(49))), COPY, 49, 3, GROUPS, 1000).token == 0.0


def test_the_loss_mask_is_the_answers():
    samples = TaskSamples(COPY, 6, 12, 3, "train")
    ((inputs, targets, _),) = next_batches(TrainLoader(samples, 6, 6), 1, GROUPS)
    for given, asked in zip(inputs.tolist(), targets.tolist(), strict=True):
        length = given.index(1)  # the id of "="
        assert asked == [UNCOUNTED] * length + given[:length] + [UNCOUNTED] * (12 - 2 * length)
        assert given[: 2 * length + 1] == [*given[:length], 1, *given[:length]]
        assert given[2 * length + 1 :] == [0] * (12 - 2 * length - 1)


def test_text_is_divided_as_before():
    tokens = torch.randint(0, 9, (3, 5))
    inputs, targets = inputs_and_targets(tokens)
    assert torch.equal(inputs, tokens[:, :-1]) and torch.equal(targets, tokens[:, 1:])


def test_a_small_model_learns_to_copy(tmp_path):
    task = build_task("copy", {"max_length": 4, "symbols": 4})
    keys = {"pos_emb": "rotary", "hidden_size": 64, "seq_length": 8, "attention_backend": "sdpa"}
    path = write_config(tmp_path / "config.yml", "builtin:copy", **(KEYS | keys))
    model = GPT(plan_of(load_config([path]), task.tokenizer.vocab_size, device_type="cpu"))
    assert accuracy_at(model, task, 4, 100, GROUPS, 2048).exact < 0.05
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
    loader, steps = TrainLoader(TaskSamples(task, 10**6, 8, 1, "train"), 64, 64), 200
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for inputs, targets, _ in next_batches(loader, steps, GROUPS):
        mean_loss(model(inputs, targets), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
    learnt = accuracy_at(model, task, 4, 100, GROUPS, 2048)
    assert learnt.exact > 0.9 and learnt.token > 0.95


def suite_of_five(groups: Groups) -> list[float]:
    """Return every estimate of the suite for an odd number of sequences."""
    few = replace(
        SAMPLE,
        sequences_nT=SAMPLE.sequences_nT[:5, :65],
        documents=SAMPLE.documents[:5],
        lengths=(32, 64),
    )
    found = measure_with_progress(Subject(induction_model(), groups, 128), few, Letters())
    return [row.estimate.value for measure in found for row in measure.rows]


def train_twice(groups: Groups, run: Path) -> list[float]:
    """Train six steps in `run`, and again in another folder from the checkpoint of step 3.

    Return the estimates of the suite on another model.
    """
    keys = KEYS | {"save_interval": 3}
    train_run(groups, run, "builtin:copy", keys)
    train_run(groups, run.with_name("resumed"), "builtin:copy", keys, source=run, step=3)
    return suite_of_five(groups)


@pytest.fixture(scope="module")
def in_two(tmp_path_factory):
    """Return the folder of a run of two data-parallel processes, and what each returned."""
    run = tmp_path_factory.mktemp("tasks") / "run"
    return run, run_ranks(2, train_twice, run)


@pytest.fixture(scope="module")
def finished(in_two):
    return in_two[0]


def test_two_processes_find_the_same_in_the_suite(in_two):
    alone = suite_of_five(GROUPS)
    assert len(alone) > 20
    for found in in_two[1]:
        assert found == pytest.approx(alone, rel=1e-5, abs=1e-6, nan_ok=True)


def test_a_resumed_run_takes_the_same_steps(finished):
    resumed = finished.with_name("resumed")
    assert digest(resumed) == digest(finished)
    assert list(rows(finished)) == [1, 2, 3, 4, 5, 6]
    assert all_but_speed(resumed) == all_but_speed(finished)
    assert (resumed / "accuracy.csv").read_bytes() == (finished / "accuracy.csv").read_bytes()


def test_a_run_writes_the_table(finished, tmp_path):
    table = pd.read_csv(finished / "accuracy.csv")
    assert table.length.tolist() == [4, 8] and table.times_train.tolist() == [1.0, 2.0]
    assert table.examples.tolist() == [40, 40]
    assert ((table.exact_low <= table.exact) & (table.exact <= table.exact_high)).all()
    assert (finished / "accuracy.png").is_file()
    said: list[str] = []
    config = load_config([finished / "config.yml"], ["train_batch_size=4", "eval_lengths=[8, 4]"])
    again = evaluate_checkpoint(config, finished, out=tmp_path, say=said.append)
    assert [(row.exact, row.token) for row in again] == list(
        zip(table.exact, table.token, strict=True)
    )
    title, _, text = said[-1].partition("\nbuiltin:copy, trained at 1 to 4, ")
    assert title == "Accuracy in copy of kerple_log, 2 layers of width 32, step 6"
    assert "\n length  times_train  examples" in text
    record = newest(finished).record
    assert record.data["task"] == "copy" and record.data["options"]["max_length"] == 4


def test_other_options_are_other_data(finished):
    options = "task_options={max_length: 4, symbols: 9}"
    config = load_config([finished / "config.yml"], ["train_batch_size=4", options])
    alone = SimpleNamespace(data_rank=0, data_size=1)
    here, there = JobData(config, alone).identity, newest(finished).record.data
    assert sorted(key for key in there if here[key] != there[key]) == ["content", "options"]
    assert JobData(config, alone).text.about == (
        "task Copy(min_length=1, max_length=4, symbols=9): 11 different tokens"
    )


def test_a_pipeline_says_what_to_run_instead(tmp_path):
    said: list[str] = []
    model = MeasuredModel(None, GROUPS, object.__new__(PipelineLosses), None, COPY.tokenizer, None)
    assert evaluate_task(model, COPY, tmp_path, said.append) == []
    assert "measure the accuracy by evaluate.py" in said[0]


def test_a_run_refuses_a_length_before_it_trains(tmp_path):
    keys = KEYS | {"task_options": {"keys": 8, "max_length": 4}, "eval_lengths": [4, 9]}
    config = load_config([write_config(tmp_path / "config.yml", "builtin:mqar", **keys)])
    with pytest.raises(TaskError, match="mqar has no examples of length 9: task_options.keys is 8"):
        JobData(config, SimpleNamespace(data_rank=0, data_size=1))


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["data_path=builtin:kopy"], "no builtin corpus is called 'builtin:kopy'; write builtin:c"),
        (["data_path=builtin:wiki"], "write builtin:python-stdlib, builtin:addition, builtin:c"),
        (["data_path=[builtin:copy, a]"], "builtin:copy stands alone; write builtin:copy, or pre"),
        (["data_path=a"], "tokenizer_type: TaskTokenizer belongs to length tasks such as builtin"),
        (
            ["data_path=a", "tokenizer_type=ByteLevelTokenizer"],
            "task_options: given, but data_path names no length task; drop this key, or write e.g.",
        ),
        (
            ["tokenizer_type=ByteLevelTokenizer"],
            "tokenizer_type: ByteLevelTokenizer, but builtin:copy has a vocabulary of its own; dr",
        ),
        (["eval_context_baseline=4"], "eval_context_baseline: is for text, but data_path is a le"),
    ],
)
def test_mistakes_in_the_configuration(overrides, text, tmp_path):
    config = write_config(tmp_path / "config.yml", "builtin:copy", **KEYS)
    assert load_config([config], ["tokenizer_type=null"]).data.tokenizer_type == "TaskTokenizer"
    with pytest.raises(ConfigError) as raised:
        load_config([config], overrides)
    assert text in str(raised.value)
