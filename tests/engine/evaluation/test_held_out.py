"""Test validation by length during training: it gives the numbers of the evaluation at the end."""

from __future__ import annotations

import csv

import pytest

from tests.helpers.jobs import rows, train_run, write_shards
from tests.helpers.launch import run_ranks

KEYS = {"eval_interval": 3, "eval_lengths_interval": 6, "train_micro_batch_size_per_gpu": 4}
TEXT = {"eval_lengths": [16, 32], "eval_tokens": 128}  # as many tokens as a validation has
TASK = {
    "tokenizer_type": "TaskTokenizer",
    "task_options": {"max_length": 4},
    "eval_lengths": [4, 8],
    "eval_examples": 20,
}


def train(groups, folder):
    train_run(groups, folder / "text", write_shards(folder), KEYS | TEXT)
    train_run(groups, folder / "task", "builtin:copy", KEYS | TASK)


def test_lengths_are_measured_during_training(tmp_path):
    run_ranks(1, train, tmp_path)
    for run, table, column in (
        ("text", "extrapolation.csv", "loss"),
        ("task", "accuracy.csv", "exact"),
    ):
        assert rows(tmp_path / run, "validation/loss").keys() == {3, 6}
        with (tmp_path / run / table).open() as file:
            results = list(csv.DictReader(file))
        assert len(results) == 2
        for result in results:
            during = rows(tmp_path / run, f"validation/{column}_at_{result['length']}")
            assert during == {6: pytest.approx(float(result[column]), rel=1e-6)}
