"""Test RunLog: metrics.jsonl, the console, and wandb, which really runs (offline)."""

from __future__ import annotations

import json
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from megatron.config import ConfigError, load_config
from megatron.config.sections.data import LoggingConfig
from megatron.engine.errors import RunLogError
from megatron.engine.run_log.log import RunLog
from megatron.parallel.loss import perplexity
from tests.helpers.jobs import metric_rows as rows
from tests.helpers.launch import untimed
from tests.helpers.paths import ROOT


def test_metrics_are_on_disk_before_the_log_is_closed(tmp_path, capsys):
    log = RunLog(tmp_path / "run", is_main=True)
    log.line("hello")
    log.metrics(10, {"loss": torch.tensor(1.5), "tokens": 4096}, "step 10")
    assert rows(tmp_path / "run") == [{"step": 10, "loss": 1.5, "tokens": 4096}]
    assert capsys.readouterr().out == "hello\nstep 10\n"
    log.close()
    log.close()


def test_other_ranks_do_nothing(tmp_path, capsys):
    with RunLog(tmp_path / "run", LoggingConfig(use_wandb=True), is_main=False) as log:
        log.line("hello")
        log.metrics(1, {"loss": 1.0}, "step 1")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_no_folder_means_console_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with RunLog(None, is_main=True) as log:
        log.metrics(1, {"loss": 1.0}, "step 1")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == "step 1\n"


def test_not_finite_numbers_leave_valid_json(tmp_path):
    with RunLog(tmp_path, is_main=True) as log:
        log.metrics(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.1})
    assert rows(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.1}]


def test_lists_are_lists_in_the_file(tmp_path):
    with RunLog(tmp_path, is_main=True) as log:
        log.metrics(1, {"theta/table": [[1, math.nan], [torch.tensor(0.5), 2.0]]})
    assert rows(tmp_path) == [{"step": 1, "theta/table": [[1, None], [0.5, 2.0]]}]


def write_metrics(folder: Path, steps: list[int], torn: str = "") -> None:
    with RunLog(folder, is_main=True) as log:
        for step in steps:
            log.metrics(step, {"loss": 1.0 / step})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(torn)


def test_resume_continues_the_file_without_doubles_or_torn_lines(tmp_path):
    write_metrics(tmp_path, [10, 20, 30, 40], torn='{"step": 50, "lo')
    with RunLog(tmp_path, is_main=True, append=True, last_step=20) as log:
        log.metrics(30, {"loss": 3.0})
    assert [row["step"] for row in rows(tmp_path)] == [10, 20, 30]
    assert rows(tmp_path)[-1]["loss"] == 3.0


def test_without_a_step_it_only_appends(tmp_path):
    write_metrics(tmp_path, [10, 20], torn='{"step": 30')
    before = (tmp_path / "metrics.jsonl").read_text()
    with RunLog(tmp_path, is_main=True, append=True) as log:
        log.metrics(30, {"loss": 3.0})
    after = (tmp_path / "metrics.jsonl").read_text()
    row = after.removeprefix(before + "\n")
    assert row.startswith('{"step": 30, "time": "20') and row.endswith(', "loss": 3.0}\n')


def test_fresh_start_keeps_the_old_file_aside(tmp_path):
    write_metrics(tmp_path, [10, 20])
    write_metrics(tmp_path, [5])
    assert [row["step"] for row in rows(tmp_path)] == [5]
    previous = (tmp_path / "metrics.jsonl.previous").read_text().splitlines()
    assert [json.loads(text)["step"] for text in previous] == [10, 20]


def test_rows_that_find_no_space_are_written_later_and_training_goes_on(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    with RunLog(tmp_path, is_main=True) as log:
        log.metrics(1, {"loss": 1.0})
        kept = path.rename(tmp_path / "kept")
        path.symlink_to("/dev/full")
        log.metrics(2, {"loss": 2.0})
        log.metrics(3, {"loss": 3.0})
        path.unlink()
        kept.rename(path)
        log.metrics(4, {"loss": 4.0})
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and f"training goes on: {path}: [Errno 28] No space left" in said


def test_a_row_that_fits_in_part_leaves_no_torn_line_and_is_counted(tmp_path, capsys):
    log = RunLog(tmp_path, is_main=True)
    log.metrics(1, {"loss": 1.0})
    first = (tmp_path / "metrics.jsonl").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(first) + 9, limits[1]))
    try:
        for step in (2, 3, 4):
            log.metrics(step, {"loss": 1.0})
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [row["step"] for row in rows(tmp_path)] == [1]
    assert f"3 rows are missing at the end of {tmp_path}" in capsys.readouterr().out


def test_a_full_disk_under_the_console_ends_nothing(tmp_path, monkeypatch):
    with open("/dev/full", "w") as full, RunLog(tmp_path, is_main=True) as log:
        monkeypatch.setattr("sys.stdout", full)
        log.metrics(1, {"loss": 1.0}, "step 1")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # to close it
    assert [row["step"] for row in rows(tmp_path)] == [1]


def test_lines_have_their_time_in_files_and_none_on_a_terminal_or_pipe(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    with open(tmp_path / "out", "w") as file, open(writer, "w") as pipe:
        for stream in (file, pipe):
            with RunLog(tmp_path / "run", is_main=True, append=True) as log:
                monkeypatch.setattr("sys.stdout", stream)
                log.line("first")
                monkeypatch.undo()
    log.line("closed logs go on to print")
    kept = (tmp_path / "run" / "log.txt").read_text()
    with open(reader) as piped:
        assert piped.read() == "first\n"
    written = (tmp_path / "out").read_text()
    assert untimed(written) == "first\n" != written and len(written) == len("first\n") + 26
    assert untimed(kept) == "first\nfirst\nclosed logs go on to print\n" and written in kept


def test_stdout_that_is_the_log_itself_has_each_line_once(tmp_path, monkeypatch):
    with open(tmp_path / "log.txt", "a") as file, RunLog(tmp_path, is_main=True) as log:
        monkeypatch.setattr("sys.stdout", file)
        log.line("hello")
        monkeypatch.undo()
    assert untimed((tmp_path / "log.txt").read_text()) == "hello\n"


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path, capsys):
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with RunLog(tmp_path, is_main=True) as log:
        log.line("hello")
        (tmp_path / "log.txt").unlink()
        os.mkfifo(tmp_path / "log.txt")  # without a reader, opening it would wait for ever
        log.line("again")
    assert capsys.readouterr().out == "hello\nagain\n"


def test_a_loss_beyond_the_range_of_exp_is_infinite_not_fatal():
    assert perplexity(709.0) == math.exp(709.0) and perplexity(710.0) == math.inf


@pytest.mark.parametrize("key, words", [("wandb_mode=ofline", "offline"), ("wandb_tam=x", "team")])
def test_wrong_wandb_options_name_the_right_ones(key, words):
    with pytest.raises(ConfigError, match=words):
        load_config([ROOT / "configs" / "quickstart.yml"], [key])


def records(path: Path) -> Iterator[Any]:
    """Yield the records in wandb's file: a 7-byte header, then fragments as in LevelDB's logs.

    A fragment has a 7-byte header. Its type is 1 for a whole record, and 2, 3 or 4 for the first, a
    middle or the last part of a record. Blocks have 32 KiB. At the end of a block, fewer than 7
    bytes are padding.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # late: each process reads this file

    content, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield Record.FromString(record)
            record = b""


def finished_runs(folder: Path) -> list[list[Any]]:
    """Return the records of each finished offline run; wandb's process may write them late."""
    runs = [list(records(path)) for path in folder.glob("wandb/offline-run-*/*.wandb")]
    return [run for run in runs if run and run[-1].HasField("exit")]


def test_wandb_offline_records_on_disk_and_a_resumed_run_adds_its_own(tmp_path, capsys):
    options = {"wandb_mode": "offline", "wandb_project": "kerple-test", "wandb_group": "g"}
    common = {"is_main": True, "settings": LoggingConfig(use_wandb=True, **options)}
    with RunLog(tmp_path, config={"hidden_size": 64}, **common) as log:
        log.metrics(10, {"loss": 1.25, "theta/bias_p": [0.5, 2.0]})
        log.metrics(20, {"loss": 1.0})
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "wandb sync" in said[0]
    with RunLog(tmp_path, append=True, last_step=10, **common) as log:
        log.metrics(20, {"loss": 0.5})
    assert [row["step"] for row in rows(tmp_path)] == [10, 20]

    deadline = time.monotonic() + 120
    while len(found := finished_runs(tmp_path)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    logged, runs, config, heads = [], set(), {}, {}
    for record in (record for run in found for record in run):
        if record.HasField("run"):
            runs.add((record.run.run_id, record.run.project, record.run.run_group))
            config |= {item.key: item.value_json for item in record.run.config.update}
        if record.HasField("history"):
            items = {i.nested_key[0]: float(i.value_json) for i in record.history.item}
            logged.append((items["step"], items["loss"]))
            heads |= {name: items[name] for name in items if name.startswith("theta/")}
    assert heads == {"theta/bias_p/0": 0.5, "theta/bias_p/1": 2.0}
    assert sorted(logged) == [(10, 1.25), (20, 0.5), (20, 1.0)]
    assert len({run_id for run_id, _, _ in runs}) == 2
    assert {(project, group) for _, project, group in runs} == {("kerple-test", "g")}
    assert config["hidden_size"] == "64"


class OnlineRun:
    """A fake of a wandb run on a server."""

    id, url, disabled, offline = "abc123", "https://wandb.invalid/abc123", False, False

    def define_metric(self, *args, **kwargs): ...

    def finish(self, exit_code): ...


def test_a_resumed_online_run_continues_the_recorded_id(tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("wandb.init", lambda **kwargs: calls.append(kwargs) or OnlineRun())
    options = {"mode": "online", "team": "t", "project": "p", "host": "https://wandb.invalid"}
    settings = LoggingConfig(use_wandb=True, **{f"wandb_{k}": v for k, v in options.items()})
    for append in (False, True, False):
        RunLog(tmp_path, settings, is_main=True, append=append).close()
    assert [(call["id"], call["resume"]) for call in calls] == [
        (None, None), ("abc123", "allow"), (None, None),
    ]  # fmt: skip
    assert calls[0]["entity"] == "t" and calls[0]["project"] == "p" and calls[0]["dir"] == tmp_path
    assert calls[0]["settings"].base_url == "https://wandb.invalid"
    assert "https://wandb.invalid/abc123" in capsys.readouterr().out


def test_pictures_go_to_wandb_under_their_step(tmp_path, monkeypatch):
    run, logged = OnlineRun(), []
    run.log = logged.append
    monkeypatch.setattr("wandb.init", lambda **_: run)
    Image.new("RGB", (4, 2)).save(tmp_path / "kernels.png")
    with RunLog(tmp_path / "run", LoggingConfig(use_wandb=True), is_main=True) as log:
        log.pictures(5, tmp_path.glob("*.png"))
    [row] = logged
    assert row["step"] == 5 and row["pictures/kernels"].image.size == (4, 2)


def test_wandb_disabled_writes_the_metrics_file_only(tmp_path):
    settings = LoggingConfig(use_wandb=True, wandb_mode="disabled")
    with RunLog(tmp_path, settings, is_main=True) as log:
        log.metrics(10, {"loss": 1.25})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "metrics.jsonl"]
    assert rows(tmp_path) == [{"step": 10, "loss": 1.25}]


def test_wandb_online_without_a_key_says_what_to_write(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    options = {"wandb_mode": "online", "wandb_host": "http://127.0.0.1:9"}
    with pytest.raises(RunLogError, match="wandb_mode: offline"):
        RunLog(tmp_path / "run", LoggingConfig(use_wandb=True, **options), is_main=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
