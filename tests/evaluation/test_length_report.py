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
from megatron.evaluation.length_report import write_extrapolation
from megatron.evaluation.perplexity_statistics import LengthResult
from tests.evaluation.figures import band_of, curves_of, names_of, ticks_of

PICTURES = {"extrapolation.png", "extrapolation.svg"}

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


def test_plot_marks_training_length_baselines_and_errors(tmp_path):
    results = [result(2**k, 1.5 - 0.01 * k) for k in range(7, 12)]
    baselines = {"16 tokens": result(16, 2.0), "8 tokens": result(8, 3.0)}
    write_extrapolation(results, tmp_path, 128, baselines, "t", {})
    width, height = image_size(tmp_path / "extrapolation.png")
    assert width > 800 and height > 500
    figure = length_report.extrapolation_figure(results, 128, baselines, "model, data\nday")
    [axes] = figure.axes
    assert figure.get_suptitle() == "model, data\nday"
    assert ticks_of(axes.xaxis) == ["128", "256", "512", "1,024", "2,048"]
    assert names_of(axes) == ["8 tokens", "16 tokens", "perplexity ±\nstandard error"]
    assert "trained at 128" in [text.get_text() for text in axes.texts]
    ends = {
        (row.length, row.perplexity + sign * row.perplexity_stderr)
        for row in results for sign in (-1, 1)
    }  # fmt: skip
    assert band_of(axes) == ends
    # The axis keeps room around the curve: 5% of difference must not look like a collapse.
    assert axes.get_yscale() == "log"  # 20 is over three times 4
    low, high = axes.get_ylim()
    lowest = min(end for _, end in ends)
    assert (low, high) == pytest.approx((0.85 * lowest, 1.15 * baselines["8 tokens"].perplexity))


def test_an_exploding_perplexity_gets_a_log_axis_with_plain_numbers():
    def figure(*losses):
        results = [result(128 * 2**n, loss) for n, loss in enumerate(losses)]
        return length_report.extrapolation_figure(results, 128, {}, "t").axes[0]

    assert figure(1.5, 2.5).get_yscale() == "linear"
    assert ticks_of(figure(1.5, 9.0).yaxis) == ["10", "100", "1,000"]
    assert ticks_of(figure(1.5, 4.2).yaxis) == ["5", "10", "20", "50"]
    assert ticks_of(figure(2.8, 4.2).yaxis) == ["20", "40", "60"]


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
    assert {p.name for p in tmp_path.iterdir()} == {*names, *PICTURES}
    before = {name: (tmp_path / name).read_bytes() for name in names}
    write_extrapolation([result(65536, 1.5)], tmp_path, 128, {}, "t", {})
    assert not (tmp_path / "context_baseline.csv").exists()
    assert (tmp_path / "extrapolation.csv").read_bytes() != before["extrapolation.csv"]
    assert before == {name: (tmp_path / f"{name}.previous").read_bytes() for name in names}


def test_no_temporary_files_stay_and_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_extrapolation([result(128, 1.5)], tmp_path, 128, {}, "t", {})
    assert {p.name for p in tmp_path.iterdir()} == {"extrapolation.csv", *PICTURES}
    before = (tmp_path / "extrapolation.csv").read_bytes()

    def full_disk(self, content):
        with self.open("wb") as file:
            file.write(content[:10])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_extrapolation([result(128, 2.5)], tmp_path, 128, {}, "t", {})
    assert (tmp_path / "extrapolation.csv").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 3


def kernels(heads: int, steepest: float = 2.0, names: tuple[str, ...] = ("bias b(d)",)):
    distances = np.arange(0, 2048.0)
    values = -np.geomspace(0.5, steepest, heads)[:, None] * np.log1p(distances)
    panels = dict.fromkeys(names, values)
    return values, length_report.kernels_figure(panels, distances, 128, "t").axes


def test_kernels_plot_draws_every_head_of_bias_and_weight():
    values, [axes] = kernels(3)
    assert axes.get_xscale() == "log" and axes.get_yscale() == "linear"
    curves = curves_of(axes)
    assert len(curves) == 3
    assert np.array_equal(curves[1].get_xdata(), np.arange(1, 2048))  # a log axis has no d = 0
    assert np.array_equal(curves[1].get_ydata(), values[1, 1:])
    assert names_of(axes) == ["head 0", "head 1", "head 2"]
    assert ticks_of(axes.xaxis) == ["1", "10", "100", "1,000"]
    _, both = kernels(3, names=("bias b(d)", "weight w(d)"))
    assert [axes.get_ylabel() for axes in both] == ["bias b(d)", "weight w(d)"]


@pytest.mark.parametrize(("heads", "plots"), [(8, [8]), (9, [5, 4]), (12, [6, 6]), (17, [6, 6, 5])])
def test_at_most_eight_heads_share_a_plot(heads, plots):
    _, found = kernels(heads)
    assert [len(curves_of(axes)) for axes in found] == plots
    assert len({axes.get_ylim() for axes in found}) == 1  # plots of one kernel can be compared
    names = [name for axes in found for name in names_of(axes)]
    assert sorted(names) == sorted(f"head {n}" for n in range(heads))
    colours = [line.get_color() for line in curves_of(found[0])]
    assert len(set(colours)) == plots[0]


def test_one_steep_head_does_not_hide_the_others():
    """One of the heads falls to -800,000: the others still end at places that an eye can tell."""
    values, [axes] = kernels(4, steepest=105_000)
    assert values.min() < -800_000 and axes.get_yscale() == "symlog"
    ends = axes.transData.transform(np.stack([np.full(4, 2047), values[:, -1]], 1))[:, 1]
    height = axes.get_window_extent().height
    assert np.diff(np.sort(ends)).min() > 0.1 * height
    assert {"0", "\N{MINUS SIGN}1", "\N{MINUS SIGN}100,000"} <= {*ticks_of(axes.yaxis)}


def test_importing_the_report_does_not_import_matplotlib(repo_root):
    code = "import sys, megatron.evaluation.length_report; print('matplotlib' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repo_root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
