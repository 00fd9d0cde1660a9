"""Test the evaluation's table, CSV and plots."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.evaluation import length_report
from megatron.evaluation.length_report import write_extrapolation, write_kernels
from megatron.evaluation.perplexity_statistics import LengthResult

ABOUT = {"distance_scale": 1.0, "split": "valid", "step": 3, "code": "c"}


def result(length: int, loss: float, stderr: float = 0.01) -> LengthResult:
    bits = loss / math.log(2)
    return LengthResult(length, 65536 // length, loss, math.exp(loss), bits, stderr)


def image_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and content[-8:-4] == b"IEND"
    return int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")


def test_csv_has_the_promised_columns_and_loses_no_digit(tmp_path):
    results = [result(512, 1.4712345678901234), result(128, 1.5), result(256, 1.47)]
    write_extrapolation(results, tmp_path / "run", 128, {}, "kerple_log", ABOUT)
    with (tmp_path / "run" / "extrapolation.csv").open() as file:
        read = list(csv.DictReader(file))
    columns = ["length", "sequences", "loss", "perplexity", "bits_per_byte", "stderr"]
    assert list(read[0]) == [*columns, "distance_scale", "split", "step", "code"]
    assert [int(row["length"]) for row in read] == [128, 256, 512]
    assert float(read[2]["loss"]) == 1.4712345678901234
    assert all(math.isclose(float(r["perplexity"]), math.exp(float(r["loss"]))) for r in read)


def test_table_shows_errors_multiples_of_the_training_length_and_the_baseline(tmp_path):
    baselines = {"16 tokens": result(16, 2.0), "8 tokens": result(8, 3.0)}
    table = write_extrapolation(
        [result(128, 1.5), result(2048, 1.25, math.nan)],
        tmp_path, train_length=128, baselines=baselines, title="kerple_log at step 1,200", about={},
    )  # fmt: skip
    lines = table.splitlines()
    assert lines[0] == "kerple_log at step 1,200"
    assert " ".join(lines[3].split()) == "128 1 512 1.5000 ± 0.0100 4.482 ± 0.045 2.1640 ± 0.0144"
    # A single sequence has no error to show.
    assert " ".join(lines[4].split()) == "2,048 16 32 1.2500 3.490 1.8034"
    assert lines[5] == "same model, 16 tokens:"
    assert lines[6].split()[:3] == ["16", "0.125", "4,096"]
    assert lines[7] == "same model, 8 tokens:" and lines[8].split()[0] == "8"
    with (tmp_path / "context_baseline.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [(row["baseline"], row["context"]) for row in read] == [
        ("16 tokens", "16"),
        ("8 tokens", "8"),
    ]
    assert float(read[0]["perplexity"]) == math.exp(2.0) and "length" not in read[0]


def test_plot_marks_training_length_baseline_and_error_bars(tmp_path):
    results = [result(2**k, 1.5 - 0.01 * k) for k in range(7, 12)]
    baselines = {"16 tokens": result(16, 2.0), "8 tokens": result(8, 3.0)}
    write_extrapolation(results, tmp_path, 128, baselines, "t", {})
    width, height = image_size(tmp_path / "extrapolation.png")
    assert width > 800 and height > 500
    axes = length_report.extrapolation_figure(results, 128, baselines, "t").axes[0]
    assert axes.get_xscale() == "log" and axes.get_yscale() == "linear"
    texts = " | ".join(text.get_text() for text in axes.get_legend().get_texts())
    assert "training length 128" in texts and "same model, 8 tokens" in texts
    bars = axes.containers[0].lines[2][0].get_segments()
    halves = [(bar[1][1] - bar[0][1]) / 2 for bar in bars]
    assert np.allclose(halves, [row.perplexity_stderr for row in results])
    # The axis keeps room around the curve: 5% of difference must not look like a collapse.
    low, high = axes.get_ylim()
    shown = [row.perplexity for row in (*results, *baselines.values())]
    assert (low, high) == pytest.approx((0.85 * min(shown), 1.15 * max(shown)))
    assert high - low > 0.3 * min(row.perplexity for row in results)


def test_an_exploding_perplexity_gets_a_log_axis():
    results = [result(128, 1.5), result(256, 9.0)]
    assert length_report.extrapolation_figure(results, 128, {}, "t").axes[0].get_yscale() == "log"


@pytest.mark.parametrize("lengths", [[], [128, 128]])
def test_rows_must_be_one_for_each_length(tmp_path, lengths):
    results = [result(length, 1.5) for length in lengths]
    with pytest.raises(ValueError, match="each length must have one result"):
        write_extrapolation(results, tmp_path, 128, {}, "t", {})
    assert list(tmp_path.iterdir()) == []


def test_tables_of_an_earlier_evaluation_stay(tmp_path):
    """The files in the folder are those of one evaluation; the one before it is not lost."""
    first, both = [result(128, 1.5)], {"16 tokens": result(16, 2.0)}
    for _ in range(2):  # a second time the same
        write_extrapolation(first, tmp_path, 128, both, "t", {})
    names = {"extrapolation.csv", "context_baseline.csv"}
    assert {p.name for p in tmp_path.iterdir()} == {*names, "extrapolation.png"}
    before = {name: (tmp_path / name).read_bytes() for name in names}
    write_extrapolation([result(65536, 1.5)], tmp_path, 128, {}, "t", {})
    assert not (tmp_path / "context_baseline.csv").exists()
    assert (tmp_path / "extrapolation.csv").read_bytes() != before["extrapolation.csv"]
    assert before == {name: (tmp_path / f"{name}.previous").read_bytes() for name in names}


def test_no_temporary_files_stay_and_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_extrapolation([result(128, 1.5)], tmp_path, 128, {}, "t", {})
    assert {p.name for p in tmp_path.iterdir()} == {"extrapolation.csv", "extrapolation.png"}
    before = (tmp_path / "extrapolation.csv").read_bytes()

    def full_disk(self, content):
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_extrapolation([result(128, 2.5)], tmp_path, 128, {}, "t", {})
    assert (tmp_path / "extrapolation.csv").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_kernels_plot_draws_every_head_of_bias_and_weight(tmp_path):
    distances = np.arange(0, 2048)
    slopes = np.array([[0.5], [1.0], [2.0]])
    bias = -slopes * np.log1p(distances)
    path = tmp_path / "run" / "kernels.png"
    write_kernels(bias, distances, None, 128, path)
    one_panel = image_size(path)
    write_kernels(bias, distances, np.exp(bias), 128, path)
    assert image_size(path)[1] == 2 * one_panel[1]
    write_kernels(None, distances, np.exp(bias), 128, path)
    assert image_size(path) == one_panel

    axes = length_report.kernels_figure([("b", bias)], distances.astype(float), 128).axes[0]
    assert axes.get_xscale() == "log"
    curves = [line for line in axes.lines if line.get_label().startswith("head")]
    assert len(curves) == 3
    assert np.array_equal(curves[1].get_xdata(), distances[1:])  # d = 0 is not on a log axis
    assert np.array_equal(curves[1].get_ydata(), bias[1, 1:])


@pytest.mark.parametrize(("heads", "named"), [(16, True), (17, False)])
def test_a_legend_names_up_to_16_heads(heads, named):
    panels = [("b", np.zeros((heads, 4))), ("w", np.ones((heads, 4)))]
    for axes in length_report.kernels_figure(panels, np.arange(4.0), 128).axes:
        legend = axes.get_legend()
        assert (legend is not None) == named
        if legend:
            assert len(legend.get_texts()) == heads + 1  # and the training length


def test_kernels_plot_refuses_what_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="does not fit"):
        write_kernels(np.zeros((2, 5)), np.arange(6), None, 128, tmp_path / "k.png")
    with pytest.raises(ValueError, match="neither"):
        write_kernels(None, np.arange(6), None, 128, tmp_path / "k.png")


def test_importing_the_report_does_not_import_matplotlib(repo_root):
    code = "import sys, megatron.evaluation.length_report; print('matplotlib' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
