"""Test validation by length during training: it gives the numbers of the evaluation at the end.

The same runs show that TensorBoard gets every number of `metrics.jsonl`, and the pictures.
"""

from __future__ import annotations

import csv
import io
import json
import math

import pytest
from PIL import Image

from megatron import pictures as drawing
from tests.helpers.board import chart, pictures, scalars, texts
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
    png = io.BytesIO()
    Image.new("RGB", (3, 2)).save(png, "PNG")
    drawing.save = lambda figure, path: path.write_bytes(png.getvalue())
    board = {"tensorboard_dir": str(folder / "board"), "peak_theoretical_tflops": 0.5}
    train_run(groups, folder / "text", write_shards(folder), KEYS | TEXT | board)
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
    every_number_is_in_tensorboard(tmp_path / "text", tmp_path / "board" / "text")


def every_number_is_in_tensorboard(run, board):
    names = set()
    shown = scalars(board)
    for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for name in row.keys() - {"step", "time", "elapsed_seconds"}:
            numbers = row[name] if isinstance(row[name], list) else [row[name]]
            tags = [f"{name}/{i}" for i in range(4)] if isinstance(row[name], list) else [name]
            tags = [chart(tag) for tag in tags]
            names |= set(tags)
            for tag, number in zip(tags, numbers, strict=True):
                assert shown[tag][row["step"]] == [pytest.approx(number, rel=1e-6)], tag
    assert names == shown.keys()
    for name in ("loss", "lr", "grad_norm", "tokens_per_second", "tflops_per_device", "mfu"):
        assert len(shown[chart(f"train/{name}")]) == 6, name
    assert list(shown["3_train/samples"].items()) == [(n, [4 * n]) for n in range(1, 7)]
    assert shown["3_train/tokens"][6] == [6 * 4 * 16] and shown["3_train/memory_gb"][6][0] > 0.05
    [mfu], [tflops] = shown["3_train/mfu"][6], shown["3_train/tflops_per_device"][6]
    assert mfu == pytest.approx(tflops / 0.5)
    [loss], [ppl] = (shown[chart(f"validation/{name}_at_32")][6] for name in ("loss", "perplexity"))
    assert ppl == pytest.approx(math.exp(loss)) and shown["2_validation/perplexity"].keys() == {
        3,
        6,
    }
    # Each validation shows the kernels, and so does the evaluation after training.
    assert [step for step, _ in pictures(board, "pictures/kernels")] == [3, 6, 6]
    card = texts(board)["card"].split("\n\n")
    assert " parameters, kerple_log, fp32, " in card[0] and card[-1].startswith("to do: 6 steps of")
    assert [step for step, _ in pictures(board, "pictures/extrapolation")] == [6]
