"""What an evaluation writes and prints: titles, baselines and kernels, with a model by hand."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from megatron import pictures
from megatron.config import load_config
from megatron.data.errors import DataError
from megatron.data.tasks.registry import build_task
from megatron.engine.build import tokenizer_of
from megatron.engine.open_text import open_text
from megatron.evaluation import accuracy, by_length
from megatron.evaluation.accuracy import Accuracy, write_accuracy
from megatron.evaluation.by_length import draw_kernels, evaluate_checkpoint, measurement_of
from megatron.model.block import SelfAttention
from megatron.parallel.groups import build_groups
from megatron.positional import load
from megatron.positional.combination import PerLayer
from tests.evaluation.figures import band_of, names_of
from tests.helpers.jobs import write_config, write_shards

CPU = build_groups(torch.device("cpu"))
KEYS = {"eval_lengths": [32, 16], "eval_tokens": 128, "train_batch_size": 8}


class Layer(SelfAttention):
    """An attention layer with nothing but a window."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.window = None


class Model(torch.nn.Module):
    """A model whose loss at each target is 1, plus 1 / (number of tokens that it sees)."""

    def __init__(self, pos, parts=()):
        super().__init__()
        self.pos, self.theta_parts, self.layer = load(pos), list(parts), Layer()

    def forward(self, inputs, targets):
        seen = torch.arange(1, inputs.shape[1] + 1)
        if self.layer.window is not None:
            seen = seen.clamp(max=self.layer.window + 1)
        return 1 + (1 / seen).expand(inputs.shape)


@pytest.fixture
def evaluate(tmp_path, monkeypatch):
    """Return a function that evaluates a model by hand, and returns the texts and the files."""

    def run(pos="kerple_log", parts=(), out="out", **keys):
        path = write_config(tmp_path / "c.yml", write_shards(tmp_path), **KEYS | keys)
        config, said = load_config([path]), []
        opened = SimpleNamespace(
            model=Model(pos, parts),
            tokenizer=tokenizer_of(config),
            said=lambda: "opened",
            saved=SimpleNamespace(step=70),
        )
        monkeypatch.setattr(by_length, "open_run", lambda *given: opened)
        monkeypatch.setattr(pictures, "save", lambda figure, path: path.write_bytes(b""))
        (tmp_path / "run").mkdir(exist_ok=True)
        folder = tmp_path / out if out else None
        results = evaluate_checkpoint(config, tmp_path / "run", out=folder, say=said.append)
        return said, folder or tmp_path / "run", results

    return run


def harmonic(length):
    return 1 + sum(1 / n for n in range(1, length + 1)) / length


def test_tables_and_titles(evaluate):
    said, folder, results = evaluate()
    assert said[0] == "opened" and said[1].startswith("length 16: perplexity ")
    title, about = said[3].splitlines()[:2]
    assert title == "Perplexity by length of kerple_log, 2 layers of width 32, step 70"
    assert re.fullmatch(r"text_document, trained at 16 tokens, \d{4}-\d\d-\d\d", about)
    assert said[4] == f"written to {folder}: extrapolation.csv and pictures"
    table = pd.read_csv(folder / "extrapolation.csv")
    assert table.loss.tolist() == pytest.approx([harmonic(16), harmonic(32)], rel=1e-6)
    assert table.sequences.tolist() == [8, 4] and table.step.tolist() == [70, 70]
    assert sorted(path.name for path in folder.iterdir()) == [
        "extrapolation.csv", "extrapolation.png", "kernels.png"
    ]  # fmt: skip
    assert [result.length for result in results] == [16, 32]


@pytest.mark.parametrize(("scale", "title"), [(0.5, "x 0.5"), (2.0, "x 2")])
def test_a_title_names_another_scale_of_distances(evaluate, scale, title):
    said, folder, _ = evaluate(eval_distance_scale=scale)
    assert said[3].startswith(f"Perplexity by length at distances {title} of kerple_log, ")
    table = pd.read_csv(folder / "extrapolation.csv")
    assert table.distance_scale.tolist() == [scale, scale]


def test_without_a_folder_the_run_gets_the_files_and_only_distances_have_kernels(evaluate):
    _, folder, _ = evaluate("rotary", out=None)
    assert folder.name == "run"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["extrapolation.csv", "extrapolation.png"]


def test_baselines_see_fewer_tokens(evaluate):
    """128 targets / 4 tokens: at most 32 windows of exactly 4 tokens, whose loss is 1 + 1/4.

    The windowed twin reads 4 sequences of 32 tokens: 28 of its 32 targets see only 4 tokens.
    """
    _, folder, _ = evaluate(eval_context_baseline=4)
    table = pd.read_csv(folder / "context_baseline.csv", index_col="baseline")
    pieces, windows, twin = table.index
    assert pieces == "the text cut into pieces of 4 tokens"
    assert windows == "the 4 tokens before each scored one"
    assert twin == "the last 4 tokens in each layer, of 32"
    assert table.loss[pieces] == pytest.approx(harmonic(4), rel=1e-6)
    assert table.loss[windows] == pytest.approx(1.25, rel=1e-6)
    assert table.loss[twin] == pytest.approx((4 * harmonic(4) + 28 * 1.25) / 32, rel=1e-6)
    # 4 sequences of 33 tokens have 29 windows each; every (116 // 32)-th is read.
    assert table.sequences.tolist() == [32, 39, 4]
    assert set(table.context) == {4}


def test_every_length_may_read_the_same_number_of_sequences(evaluate):
    _, folder, _ = evaluate(eval_sequences=3)
    table = pd.read_csv(folder / "extrapolation.csv")
    assert table.length.tolist() == [16, 32] and table.sequences.tolist() == [3, 3]


def test_losses_that_are_not_numbers_are_told_and_written(evaluate, monkeypatch):
    monkeypatch.setattr(Model, "forward", lambda self, inputs, targets: inputs * math.nan)
    said, folder, _ = evaluate()
    assert said[3] == "the model's losses are not finite; -o precision=fp32 may help"
    assert pd.read_csv(folder / "extrapolation.csv").loss.isna().all()


def test_lengths_without_a_common_text_say_what_they_leave_out(evaluate):
    said, folder, _ = evaluate(eval_lengths=[15, 16, 30], eval_tokens=130)
    assert said[1] == "the lengths do not have the same text: of 120 tokens, length 16 leaves out 8"
    assert pd.read_csv(folder / "extrapolation.csv").sequences.tolist() == [8, 7, 4]
    assert all("leaves out" not in text for text in evaluate(eval_lengths=[15, 30])[0])


def test_a_baseline_reads_the_text_of_the_longest_length(evaluate):
    """Two sequences of 32 tokens are 16 pieces of 4 tokens."""
    _, folder, _ = evaluate(eval_sequences=2, eval_context_baseline=4)
    table = pd.read_csv(folder / "context_baseline.csv")
    assert table.sequences.tolist()[::2] == [16, 2]
    assert pd.read_csv(folder / "extrapolation.csv").sequences.tolist() == [2, 2]
    # So it does if it has one of the lengths, which alone reads two sequences of 16 tokens.
    _, folder, _ = evaluate(eval_sequences=2, eval_context_baseline=16)
    table = pd.read_csv(folder / "context_baseline.csv")
    assert table.sequences.tolist()[::2] == [4, 2]


def test_a_split_that_is_too_short_is_an_error(tmp_path):
    path = write_config(
        tmp_path / "c.yml",
        write_shards(tmp_path, 10),
        **KEYS | {"eval_lengths": [3000], "eval_tokens": 3000},
    )
    config = load_config([path])
    tokenizer = tokenizer_of(config)
    text = open_text(config, tokenizer)
    with pytest.raises(
        DataError, match=r"^the valid split \(1 documents\) is shorter than one seq"
    ):
        measurement_of(config, CPU, Model("alibi"), tokenizer, text, 128)


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Return a function that calls `draw_kernels`, and returns the figure of each file's name."""

    def draw(pos, theta=None, *, few=False, **keys):
        figures = {}
        monkeypatch.setattr(pictures, "save", lambda figure, path: figures.update({path: figure}))
        config = load_config([write_config(tmp_path / "c.yml", "text", **KEYS | keys)])
        files = draw_kernels(pos, theta, config, tmp_path, 70, few=few)
        assert files == [*figures]
        return {path.name: figure for path, figure in figures.items()}

    return draw


def test_kernels_of_a_run_without_lengths_reach_to_its_training_length(drawn):
    [axes] = drawn(load("alibi"), eval_lengths=[])["kernels.png"].axes
    assert axes.lines[0].get_xdata().max() == 16


def test_kernels_are_those_of_trained_theta(drawn):
    """kerple_log: b(d) = -p log(1 + a d), for p = 1, 2, 3, 4 and a = 0.5."""
    theta = torch.tensor([[p, 0.5] for p in (1.0, 2.0, 3.0, 4.0)])
    figure = drawn(load("kerple_log"), theta)["kernels.png"]
    title, about = figure.get_suptitle().splitlines()
    assert title == "The kernel of each head of kerple_log, 2 layers of width 32, step 70"
    assert about.startswith("text, trained at 16 tokens, 20")
    [axes] = figure.axes
    assert axes.get_ylabel() == "bias b(d)"
    for head in range(4):
        distances, values = axes.lines[head].get_data()
        assert distances.tolist() == list(range(1, 33))  # up to the largest of `eval_lengths`
        expected = -(head + 1) * torch.log1p(0.5 * torch.arange(1, 33))
        assert values == pytest.approx(expected.numpy(), rel=1e-5)


def test_only_distances_have_pictures(drawn):
    assert drawn(load("sandwich+rotary")).keys() == {"kernels.png"}
    assert drawn(load("rotary")) == {}


def test_validations_draw_three_kernels_of_many_layers(drawn):
    pos = PerLayer([load("none"), *[load("kerple_log")] * 5], own_theta=True)
    assert len(drawn(pos, num_layers=6)) == 5
    found = drawn(pos, few=True, num_layers=6)
    assert [*found] == [f"kernels_layer{n}.png" for n in (1, 3, 5)]
    title = found["kernels_layer3.png"].get_suptitle()
    assert title.startswith("The kernel of each head in layer 3 (3 of 5 kernels) of kerple_log, 6")
    three = PerLayer([load("kerple_log")] * 3, own_theta=True)
    assert len(drawn(three, few=True, num_layers=3)) == 3


COPY = build_task("copy", {"max_length": 4})


def test_the_picture_of_the_accuracy_has_its_interval(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: figures.append(figure))
    rows = [
        Accuracy(4, 1.0, 10, exact=0.5, exact_low=0.2, exact_high=0.6, token=0.9),
        Accuracy(8, 2.0, 10, exact=0.25, exact_low=0.125, exact_high=0.5, token=0.75),
    ]
    text = write_accuracy(
        rows,
        COPY,
        tmp_path / "new",
        "a title",
        {"distance_scale": 1.0, "split": "x", "step": 3, "code": "c"},
    )
    assert text.startswith("a title\n length  times_train  examples  exact")
    assert " 0.125 " in text and "distance_scale" in text and "code" not in text
    assert text.endswith(f"written to {tmp_path}/new: accuracy.csv and accuracy.png")
    axes = figures[0].axes[0]
    assert band_of(axes) == {(4, 0.2), (4, 0.6), (8, 0.125), (8, 0.5)}
    low, high = axes.get_ylim()
    assert low < 0 and high > 1  # points at 0 and 1 are inside the frame
    assert names_of(axes) == ["tokens", "whole answers, 95%\ninterval"]


@pytest.mark.parametrize(("scale", "title"), [(1.0, ""), (0.5, " at distances x 0.5")])
def test_the_title_of_the_accuracy(tmp_path, monkeypatch, scale, title):
    found = Accuracy(4, 1.0, 10, 0.5, 0.2, 0.6, 0.9)
    given = []
    monkeypatch.setattr(accuracy, "accuracy_at", lambda *each: given.append(each[2:4]) or found)
    monkeypatch.setattr(pictures, "save", lambda figure, path: None)
    config = write_config(
        tmp_path / "c.yml", "builtin:copy", tokenizer_type="TaskTokenizer", train_batch_size=4,
        task_options={"max_length": 4}, eval_lengths=[8, 4], eval_examples=7,
        eval_distance_scale=scale,
    )  # fmt: skip
    measured = SimpleNamespace(
        loss_fn=None, config=load_config([config]), groups=CPU, module=Model("alibi"), step=3
    )
    said: list[str] = []
    accuracy.evaluate_task(measured, COPY, tmp_path, said.append)
    assert given == [(4, 7), (8, 7)]
    assert said[0].startswith(f"Accuracy in copy{title} of alibi, 2 layers of width 32, step 3\n")
    assert said[0].splitlines()[1].startswith("builtin:copy, trained at 1 to 4, 20")
    rows = pd.read_csv(tmp_path / "accuracy.csv")
    assert (
        rows[["distance_scale", "step", "split"]].to_numpy().tolist() == [[scale, 3, "valid"]] * 2
    )
