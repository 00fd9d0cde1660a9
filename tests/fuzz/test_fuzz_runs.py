"""Damaged files of a run folder and of a grid's folder, read by every command that reads them.

Each input replaces one file of a whole run, by damaged bytes or by something that is no file. Each
command then gives a result or an error of our own, and does not wait.
"""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.config import load_config
from megatron.engine.checkpoint.choose_start import choose_start
from megatron.engine.checkpoint.exchange import export_checkpoint
from megatron.engine.job import lease
from megatron.engine.open_run import open_run
from megatron.engine.run_log.log import RunLog
from megatron.errors import USER_ERRORS
from megatron.files import replace_table
from megatron.parallel.groups import build_groups
from megatron.run_folder import RunFolder
from tests.fuzz.damage import FOLDER, Hang, damaged
from tests.helpers.paths import FIXTURES
from tools import sweep, table
from tools.experiments.grid import read_grid
from tools.experiments.runner import Runner
from tools.experiments.state import Record, state_of

WRITTEN = FIXTURES / "checkpoint"
GRIDS, CELL = FOLDER / "grid", "kerple_log-1"
RUN = GRIDS / "runs" / CELL
WHOLE = FOLDER / "whole"
SECONDS = 120
TABLE = b"length,sequences,loss,perplexity,bits_per_byte,stderr,distance_scale\n"
FILES = {
    "metrics.jsonl": b'{"step": 3, "train/loss": 2.5, "theta/bias_p": [1.0, 2.0], '
    b'"theta/bias_a": [1.0, 2.0]}\n{"step": 4, "train/loss": 2.25}\n',
    "extrapolation.csv": TABLE + b"16,32,2.5,12.2,3.6,0.1,1.0\n32,16,2.4,11.0,3.5,0.1,1.0\n",
    "suite/by_position.csv": b"context,value,low\n1,5,4\n2,4,3\n",
    "log.txt": b"step 1\n",
    "kernels.png": b"\x89PNG\r\n",
    ".latest.7.unfinished": b"global_step3",
    ".lease-1": json.dumps({"pid": 5, "host": "elsewhere", "machine": "elsewhere"}).encode(),
    "wandb_id": b"abc123\n",
}  # fmt: skip
RECORDS = ("latest", "config.yml", "cell.json", "global_step3/kerple.json", *FILES)
ALL = (*RECORDS, "global_step3/mp_rank_00_model_states.pt")
OURS = suppress(*USER_ERRORS, SystemExit)
KINDS = ("fifo", "folder", "device", "loop", "absent")


@functools.cache
def grid() -> Path:
    """Make a grid of one cell, whose run is finished, and a copy of its folders to restore."""
    keys = yaml.safe_load((WRITTEN / "config.yml").read_text())
    keys = {key: value for key, value in keys.items() if key not in ("save", "load", "pos_emb")}
    keys |= {"data_path": str(WRITTEN / "data/text_document"), "train_iters": 3, "eval_tokens": 64}
    for folder in (GRIDS, WHOLE):  # of another process of this search
        shutil.rmtree(folder, ignore_errors=True)
    RUN.parent.mkdir(parents=True)
    shutil.copytree(WRITTEN / "run", RUN)
    base, path = GRIDS / "base.yml", GRIDS / "grid.yml"
    base.write_text(yaml.safe_dump(keys))
    content = {
        "runs": str(RUN.parent), "configs": [str(base)], "seeds": [1], "lengths": [16, 32],
        "overrides": {"pos_emb": "{embedding}"}, "axes": {"embedding": ["kerple_log"]},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(content))
    (cell,) = read_grid(path).cells
    (RUN / "config.yml").write_text(cell.config().to_yaml())
    (RUN / "suite").mkdir()
    for name, written in FILES.items():
        (RUN / name).write_bytes(written)
    record = Record.of(cell)
    record.state = "finished"
    record.write(RUN)
    assert state_of(cell) == ("finished", "")
    shutil.copytree(RUN, WHOLE)
    return path


def restored() -> None:
    shutil.rmtree(RUN, ignore_errors=True)
    shutil.copytree(WHOLE, RUN)


@contextmanager
def in_time() -> Iterator[None]:
    """Raise `Hang` if the block takes longer than `SECONDS`: it may wait for a pipe."""

    def hang(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def list_cells() -> int:
    return sweep.main([str(grid()), "--list"])


def run_cells() -> int:
    """Run the grid, with a process in place of train.py that does nothing and fails."""
    done = SimpleNamespace(returncode=1, poll=lambda: 1, send_signal=print, kill=print)
    start, Runner.run.__globals__["start"] = Runner.run.__globals__["start"], lambda *_: done
    signals = {number: signal.getsignal(number) for number in sweep.SIGNALS}
    try:
        return sweep.main([str(grid())])
    finally:
        Runner.run.__globals__["start"] = start
        for number, handler in signals.items():
            signal.signal(number, handler)


def table_of_grid() -> int:
    return table.main([str(grid()), "--out", str(FOLDER / "out")])


def table_of_run() -> int:
    return table.main([str(RUN), "--out", str(FOLDER / "out")])


def use() -> None:
    """What evaluate.py, generate.py and export_hf.py read."""
    open_run(RUN)
    for path in RunFolder(RUN).results:
        replace_table(path, b"new")


def export() -> None:
    shutil.rmtree(FOLDER / "exported", ignore_errors=True)
    export_checkpoint(RUN, FOLDER / "exported")


def resume() -> None:
    """What train.py reads when it resumes, up to the first step."""
    groups = build_groups(torch.device("cpu"))
    (cell,) = read_grid(grid()).cells
    config = load_config(cell.configs, [*cell.overrides, "train_iters=6"])
    with lease.sole_writer(RUN) as confirm:
        start = choose_start(config, groups, 24)
        options: dict[str, Any] = {"append": True, "last_step": 3, "confirm": confirm}
        with RunLog(RUN, is_main=True, **options) as log:
            log.metrics(4, {"train/loss": 2.0})
    assert start.text


Commands = tuple[Callable[[], Any], ...]
COMMANDS: Commands = (
    list_cells, run_cells, table_of_grid, table_of_run, use, export, resume,
)  # fmt: skip


ONE = st.sampled_from([(command,) for command in COMMANDS])


def try_all(commands: Commands) -> None:
    """Run each of the commands on the damaged run, each on a fresh copy of it."""
    held, lease.LIFETIME = lease.LIFETIME, 0.05
    kept = FOLDER / "damaged"
    shutil.rmtree(kept, ignore_errors=True)
    RUN.rename(kept)
    try:
        for command in commands:
            shutil.rmtree(RUN, ignore_errors=True)
            copy(kept, RUN)
            out = io.StringIO()
            with in_time(), redirect_stdout(out), redirect_stderr(out), OURS:
                assert command() in (None, 0, 1, 2), command
            assert "Traceback" not in out.getvalue(), out.getvalue()
    finally:
        lease.LIFETIME = held


def copy(source: Path, target: Path) -> None:
    """Copy a folder with whatever is in it."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_dir() and not path.is_symlink():
            copy(path, target / path.name)
        elif path.is_fifo():
            os.mkfifo(target / path.name)
        else:
            shutil.copy2(path, target / path.name, follow_symlinks=False)


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return the name of a file and its new content."""
    grid()
    name = draw(st.sampled_from(RECORDS))
    return name, draw(damaged([(WHOLE / name).read_bytes(), b""], most=3))


NUL = FILES["metrics.jsonl"] + b"\0" * 40 + b"\n"
BIG = b'{"step": ' + b"9" * 400 + b"}\n"
ODD = b'{"step": 3, "theta/bias_p": ["x"], "theta/bias_a": [[1], 2]}\n'
FLAT = b'{"step": 3, "theta/bias_p": [1.0], "theta/bias_a": [1.0]}\n'


@given(damages(), ONE)
@example(("metrics.jsonl", NUL), COMMANDS)
@example(("metrics.jsonl", BIG), COMMANDS)
@example(("metrics.jsonl", ODD), COMMANDS)
@example(("metrics.jsonl", FLAT), COMMANDS)
@example(("cell.json", b'{"config": null}'), COMMANDS)
@example(("extrapolation.csv", TABLE + b"16,\xff\xfe,2,3,4,5,1\n"), COMMANDS)
@example(("extrapolation.csv", TABLE + b"x,32,2,y,4,5,1\n"), COMMANDS)
@example(("extrapolation.csv", TABLE + b"1e999,32,2,3,4,5,1\n"), COMMANDS)
@example(("extrapolation.csv", b""), COMMANDS)
@example(("suite/by_position.csv", b"a,b\n1,2\n"), COMMANDS)
@example((".lease-1", b"[" * 3000), COMMANDS)
@example((".lease-1", b'{"pid": ' + b"1" * 31 + b"}"), COMMANDS)
@example(("log.txt", b"\xff" * 200_000), COMMANDS)
@example(("latest", b"\0" * 10_000), COMMANDS)
@example(("config.yml", b"\0"), COMMANDS)
def test_any_bytes_in_a_file_of_a_run(damage: tuple[str, bytes], commands: Commands) -> None:
    name, content = damage
    grid()
    restored()
    (RUN / name).write_bytes(content)
    try_all(commands)


@given(st.sampled_from(ALL), st.sampled_from(KINDS), ONE)
@example(".lease-1", "fifo", COMMANDS)
@example("log.txt", "fifo", COMMANDS)
@example("metrics.jsonl", "fifo", COMMANDS)
@example("config.yml", "fifo", COMMANDS)
@example("extrapolation.csv", "fifo", COMMANDS)
@example("kernels.png", "fifo", COMMANDS)
@example(".latest.7.unfinished", "fifo", COMMANDS)
def test_what_is_no_file_in_a_run(name: str, kind: str, commands: Commands) -> None:
    grid()
    restored()
    path = RUN / name
    path.unlink()
    make = {
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path.name),
        "absent": lambda: None,
    }
    make[kind]()
    try_all(commands)


def test_the_whole_run_is_read_by_every_command() -> None:
    """Without damage, the commands of this fuzzer reach their ends."""
    grid()
    for command in COMMANDS:
        restored()
        held, lease.LIFETIME = lease.LIFETIME, 0.05
        try:
            assert command() in (None, 0), command
        finally:
            lease.LIFETIME = held
