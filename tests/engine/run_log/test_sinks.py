"""Test what TensorBoard shows: it reads the event files as its own program does."""

from __future__ import annotations

import errno
import io
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from megatron.config.sections.data import LoggingConfig
from megatron.engine.errors import RunLogError
from megatron.engine.run_log.log import RunLog
from megatron.engine.training.speed import Speed, flops_per_token
from megatron.model.shape import BlockShape, GPTShape
from tests.helpers.board import chart, pictures, scalars, texts
from tests.helpers.paths import ROOT


def log_at(folder: Path, **options) -> RunLog:
    settings = LoggingConfig(tensorboard_dir=str(folder / "board"))
    return RunLog(folder / "run", settings, is_main=True, **options)


def test_it_shows_each_number_and_picture(tmp_path, capsys):
    with log_at(tmp_path, config={"hidden_size": 64}, card="a model\na text") as log:
        log.metrics(10, {"train/loss": torch.tensor(1.5), "theta/bias_p": [0.5, math.inf]})
        Image.new("RGB", (4, 2), "red").save(tmp_path / "kernels.png")
        log.pictures(10, tmp_path.glob("*.png"))
        shown = scalars(tmp_path / "board/run")  # before the log is closed
    assert shown == {
        "1_loss/train": {10: [1.5]},
        "4_theta/bias_p/0": {10: [0.5]},
        "4_theta/bias_p/1": {10: [math.inf]},
    }
    assert texts(tmp_path / "board/run") == {
        "card": "a model\n\na text", "config": "    hidden_size: 64"
    }  # fmt: skip
    [(step, png)] = pictures(tmp_path / "board/run", "pictures/kernels")
    image = Image.open(io.BytesIO(png))
    assert step == 10 and image.size == (4, 2) and image.getpixel((3, 1)) == (255, 0, 0)
    assert f"tensorboard --logdir {tmp_path / 'board'}`" in capsys.readouterr().out


def test_a_resumed_run_shows_no_step_twice(tmp_path):
    """Every start and `go_back` shows what `metrics.jsonl` holds, NaN apart."""
    with log_at(tmp_path) as log:
        for step in (1, 2, 3, 4):
            log.metrics(step, {"loss": math.nan if step == 2 else step / 8, "lr": 0.5})
        log.metrics(2, {"validation/loss": 7.0})
    resumed = {"append": True, "last_step": 2}
    for again in (9, 9.5):  # the second start goes back to the same checkpoint
        with log_at(tmp_path, **resumed) as log:
            log.go_back(2, validates_again=True)
            log.metrics(2, {"validation/loss": again})
            log.metrics(3, {"loss": again})
    expected = {
        "5_loss": {1: [0.125], 3: [9.5]},
        "5_lr": {1: [0.5], 2: [0.5]},
        "1_loss/validation": {2: [9.5]},
    }
    assert scalars(tmp_path / "board/run") == expected
    with log_at(tmp_path, append=True, last_step=3) as log:
        log.metrics(4, {"loss": 1.0})
        log.go_back(3)
        log.metrics(4, {"loss": 2.0})
    expected["5_loss"] |= {4: [2.0]}
    assert scalars(tmp_path / "board/run") == expected
    with log_at(tmp_path) as log:  # a new run from step 0 in the same folder
        log.metrics(1, {"loss": 3.0})
    assert scalars(tmp_path / "board/run") == {"5_loss": {1: [3.0]}}


def test_losses_come_first_and_final_results_last(tmp_path):
    names = ["compile/graphs", "final/test_loss", "theta/bias_p_max", "train/loss", "train/lr",
             "train/loss_scale", "validation/loss", "validation/loss_at_64",
             "validation/perplexity"]  # fmt: skip
    with log_at(tmp_path) as log:
        log.metrics(1, dict.fromkeys(names, 1.0))
    shown = sorted(scalars(tmp_path / "board/run"))  # as TensorBoard sorts its charts
    assert shown == [
        "1_loss/train", "1_loss/validation", "1_loss/validation_at_64", "2_validation/perplexity",
        "3_train/loss_scale", "3_train/lr", "4_theta/bias_p_max", "5_compile/graphs",
        "9_final/test_loss",
    ]  # fmt: skip
    assert shown == sorted(map(chart, names))


def test_wandb_has_the_names_of_neox_and_final_results_in_the_summary(tmp_path, monkeypatch):
    logged, calls = [], []
    run = SimpleNamespace(
        id="a", url="u", disabled=False, offline=False, summary={}, log=logged.append,
        define_metric=lambda *_, **__: None, finish=lambda exit_code: None,
    )  # fmt: skip
    monkeypatch.setattr("wandb.init", lambda **given: calls.append(given) or run)
    with RunLog(None, LoggingConfig(use_wandb=True), is_main=True, card="in words") as log:
        log.metrics(1, {"train/loss": 2.0, "train/lr": 0.1, "train/grad_norm": 3.0})
        log.metrics(2, {"validation/loss": 1.0, "validation/perplexity": 2.7})
        speed = {"samples_per_second": 8.0, "seconds_per_step": 0.5, "tflops_per_device": 1.5}
        log.metrics(3, {f"train/{name}": value for name, value in speed.items()})
        log.metrics(2, {"final/test_loss": 1.5})
    assert logged == [
        {"step": 1, "train/lm_loss": 2.0, "train/learning_rate": 0.1, "train/grad_norm": 3.0},
        {"step": 2, "validation/lm_loss": 1.0, "validation/lm_loss_ppl": 2.7},
        {
            "step": 3, "runtime/samples_per_sec": 8.0, "runtime/iteration_time": 0.5,
            "runtime/flops_per_sec_per_gpu": 1.5e12,
        },
    ]  # fmt: skip
    assert run.summary == {"final/test_loss": 1.5} and calls[0]["notes"] == "in words"


def test_other_ranks_write_no_events(tmp_path):
    settings = LoggingConfig(tensorboard_dir=str(tmp_path / "board"))
    RunLog(tmp_path / "run", settings, is_main=False).close()
    assert not (tmp_path / "board").exists()


def test_a_missing_package_is_named_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(RunLogError, match="tensorboard_dir: ") as error:
        log_at(tmp_path)
    pin = str(error.value).partition("`pip install ")[2].partition("`")[0]
    assert pin in (ROOT / "requirements-optional.txt").read_text().splitlines()
    assert not (tmp_path / "run").exists()


def test_a_wrong_folder_is_named_before_a_file_changes(tmp_path):
    (tmp_path / "board").write_text("")
    with pytest.raises(RunLogError, match="tensorboard_dir: .*board/run cannot be written"):
        log_at(tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_under_the_events_ends_nothing(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with log_at(tmp_path) as log:
        monkeypatch.setattr("torch.utils.tensorboard.writer.SummaryWriter.flush", full)
        log.metrics(1, {"loss": 1.0})
        log.metrics(2, {"loss": 2.0})
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    said = capsys.readouterr().out
    assert said.count("training goes on") == 1 and "No space left" in said


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_one_progress_line_that_is_rewritten(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # start no thread
    with RunLog(tmp_path, is_main=True) as log:
        for step in (1, 2, 3):
            log.progress(step, 1000, f"loss {step}.5 | 9 tokens/s | ETA 0:00:0{step}")
        log.line("a line")
    lines = screen.getvalue().split("\n")
    assert len(lines) == 2  # the line, and the progress that is rewritten by carriage returns
    last = lines[0].split("\r")
    assert last[-1] == "a line" and last[-2].strip() == ""
    assert "step 3/1000 |" in lines[1] and "| loss 3.5 | 9 tokens/s | ETA 0:00:03" in lines[1]
    assert "\x1b[" not in screen.getvalue()  # no colour


@pytest.mark.parametrize(("columns", "shown"), [(12, "a long line"), (8, "shorter"), (4, "short")])
def test_a_line_does_not_wrap_on_a_terminal_and_is_whole_in_the_log(
    tmp_path, monkeypatch, columns, shown
):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    with RunLog(tmp_path, is_main=True) as log:
        log.metrics(1, {}, "a long line", "shorter", "short")
    assert screen.getvalue() == f"{shown}\n"
    assert (tmp_path / "log.txt").read_text().endswith(" a long line\n")


def test_a_file_has_no_progress_line(tmp_path, capsys):
    with RunLog(tmp_path, is_main=True) as log:
        log.progress(1, 1000, "loss 2")
        log.metrics(1, {}, "a line that is longer than any terminal" * 9, "short")
        log.line("a line")
    said = capsys.readouterr().out.splitlines()
    assert said == ["a line that is longer than any terminal" * 9, "a line"]


def test_arithmetic_of_a_token():
    """GPT-2 small by hand: 12 h^2 weights a layer and the tied table, then attention."""
    block = BlockShape(hidden_size=768, num_heads=12)
    shape = GPTShape(num_layers=12, vocab_size=50304, block=block, max_positions=1024)
    weights = 12 * 12 * 768**2 + 50304 * 768
    assert flops_per_token(shape, 1024) == 6 * weights + 12 * 12 * 768 * 1024
    speed = Speed(flops_per_token={1024: 2e9}, devices=4, peak_tflops=10.0)
    found = speed.metrics(1000.0, [1024], torch.device("cpu"))
    assert found["train/tflops_per_device"] == 0.5 and found["train/mfu"] == 0.05
    assert 0.01 < found["train/memory_gb"] < 1000
    grouped = BlockShape(hidden_size=64, num_heads=8, num_kv_heads=2, activation="swiglu")
    shape = GPTShape(num_layers=1, vocab_size=8, block=grouped, max_positions=8)
    weights = 64 * (64 + 2 * 16) + 64 * 64 + 3 * 64 * 256 + 8 * 64
    assert flops_per_token(shape, 8) == 6 * weights + 12 * 64 * 8
