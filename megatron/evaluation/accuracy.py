"""Measure a model's accuracy on a length task, by the length of its examples.

    exact accuracy = examples whose answer tokens are all right / examples
    token accuracy = answer tokens that are right / answer tokens

An answer token is right if the model assigns it the highest probability, given the true tokens
before it. If all answer tokens are at the end of the example, greedy generation would have the same
exact accuracy, because it reads the same tokens up to its first mistake. The exact accuracy has a
95% interval by Wilson's method. The token accuracy has no interval, because the tokens of one
example are not independent.

scipy and pandas are imported inside the functions, so that training does not wait for these
imports.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron import pictures
from megatron.data.tasks.base import Task
from megatron.data.tasks.samples import examples_at
from megatron.engine.training.pipeline_engine import PipelineLosses
from megatron.evaluation.length_report import csv_of, picture_title
from megatron.evaluation.losses import MeasuredModel, losses_of_sequences
from megatron.evaluation.perplexity_statistics import measured_with, scaled
from megatron.files import replace_table
from megatron.parallel.groups import Groups
from megatron.parallel.loss import UNCOUNTED, inputs_and_targets
from megatron.run_folder import RunFolder


@dataclass(frozen=True)
class Accuracy:
    """The accuracy at one length: the first columns of a row of `accuracy.csv`."""

    length: int
    times_train: float  # the length, divided by the longest length in training
    examples: int
    exact: float
    exact_low: float  # the bounds of the 95% interval of `exact`
    exact_high: float
    token: float


def accuracy_at(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    task: Task,
    length: int,
    count: int,
    groups: Groups,
    batch_tokens: int,
) -> Accuracy:
    """Measure the accuracy of a model on `count` examples of one length.

    Every rank must call this function.

    Args:
        logits_of: A function from tokens [B, T] to logits [B, T, vocabulary].
        task: The length task.
        length: The length of the examples.
        count: The number of examples.
        groups: The job's process groups.
        batch_tokens: The approximate number of tokens in a forward pass.
    """

    from scipy.stats import binomtest

    def mistakes(tokens_BT: torch.Tensor, next_BT: torch.Tensor) -> torch.Tensor:
        inputs_BT, targets_BT = inputs_and_targets(torch.cat([tokens_BT, next_BT[:, -1:]], 1))
        wrong_BT = logits_of(inputs_BT).argmax(-1) != targets_BT
        return wrong_BT & (targets_BT != UNCOUNTED)

    rows = examples_at(task, length, count)
    shares = losses_of_sequences(mistakes, rows, groups, batch_tokens=batch_tokens)
    wrong = np.rint(shares * (rows.shape[1] - 1)).astype(int)
    right, asked = int((wrong == 0).sum()), int((rows >= 0).sum())
    interval = binomtest(right, count).proportion_ci(method="wilson")
    return Accuracy(
        length=length, times_train=length / task.max_length, examples=count, exact=right / count,
        exact_low=float(interval.low), exact_high=float(interval.high),
        token=(asked - int(wrong.sum())) / asked,
    )  # fmt: skip


def evaluate_task(
    model: MeasuredModel, task: Task, run_dir: Path, say: Callable[[str], None]
) -> list[Accuracy]:
    """Measure a model's accuracy on a length task at each of `eval_lengths`.

    The function prints a table, and writes a CSV file and a plot. Every rank must call this
    function. In a pipelined job, the function only prints a hint to use `evaluate.py`, and returns
    [].

    Args:
        model: The model.
        task: The length task.
        run_dir: The folder into which the CSV file and the plot are written.
        say: A function that prints a text.

    Raises:
        TaskError: The task's options do not allow one of the lengths.
    """
    if isinstance(model.loss_fn, PipelineLosses):
        say("a pipeline gives no logits: measure the accuracy by evaluate.py, with the same config")
        return []
    chosen, rows = model.config.evaluation, []
    for length in sorted(set(chosen.eval_lengths)):
        count, size = chosen.eval_examples, chosen.eval_batch_tokens
        rows.append(accuracy_at(model.loss_fn, task, length, count, model.groups, size))
    if model.groups.is_main:
        what = scaled(f"Accuracy in {task.name}", model.config)
        lengths = f"{task.min_length} to {task.max_length}"
        title = picture_title(what, model.module.pos.name, model.config, model.step, lengths)
        about = measured_with(model.config, model.step, "eval_examples")
        say(write_accuracy(rows, task, run_dir, title, about))
    return rows


def write_accuracy(
    rows: Sequence[Accuracy], task: Task, run_dir: Path, title: str, about: Mapping[str, Any]
) -> str:
    """Write `accuracy.csv` and its plot into `run_dir`, and return the table as text.

    Args:
        rows: The accuracy at each length.
        task: The length task.
        run_dir: The folder.
        title: The title of the plot and of the text.
        about: Columns to add to the table. Each column has the same value in all rows.
    """
    import pandas as pd

    table = pd.DataFrame(rows).assign(**about)
    path = RunFolder(run_dir).accuracy
    picture = path.with_suffix(".png")
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_table(path, csv_of(table))
    band = table.exact_low, table.exact_high
    curves = [
        pictures.Curve("whole answers, 95% interval", table.length, table.exact, band),
        pictures.Curve("tokens", table.length, table.token),
    ]
    lengths = task.max_length
    figure = pictures.by_length(title, [curves], "length", "accuracy", lengths, fit=False)
    figure.axes[0].set_ylim(-0.02, 1.02)
    pictures.save(figure, picture)
    shown = table.drop(columns=[*about.keys() - {"distance_scale"}])
    text = shown.to_string(index=False, float_format="{:.3f}".format)
    return f"{title}\n{text}\nwritten to {run_dir}: {path.name} and {picture.name}"
