"""A run on a terminal of 100 columns: no line wraps, from the first one to the table of lengths."""

import fcntl
import os
import re
import struct
import sys
import termios
import time
from pathlib import Path
from threading import Thread

from megatron import cpu_settings
from tests.helpers.jobs import run_job, write_config, write_shards
from tests.helpers.launch import run_ranks

COLUMNS = 100


def shown(groups, config: Path) -> str:
    """Train on a pseudo-terminal, and return what it received."""
    os.environ["COLUMNS"] = str(COLUMNS)
    for name in cpu_settings.VARIABLES:
        os.environ.pop(name, None)
    cpu_settings.running_threads = lambda: 999
    cpu_settings.choose_waiting()  # says why in the line `threads:`
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    received = bytearray()
    Thread(target=read, args=(ours, received), daemon=True).start()
    sys.stdout = os.fdopen(theirs, "w")
    run_job(groups, config)
    print("end of the run", flush=True)
    while b"end of the run" not in received:
        time.sleep(0.01)
    return received.decode()


def read(terminal: int, received: bytearray) -> None:
    while True:
        received.extend(os.read(terminal, 1 << 16))


def test_no_line_wraps_at_100_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = write_config(
        tmp_path / "c.yml", write_shards(tmp_path), pos_emb="kerple_log+kerple_power", save="run",
        train_iters=2, eval_interval=2, save_interval=2, eval_lengths=[16, 32], eval_tokens=512,
        train_micro_batch_size_per_gpu=4,
    )  # fmt: skip
    [text] = run_ranks(1, shown, config)
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text))
    assert [line for line in lines if len(line) > COLUMNS] == []
    for start in (
        r"[\d,]+ parameters",
        "threads: GOMP_",
        "step 1/2 .*theta ",
        "  saved ",
        "length ",
    ):
        assert any(re.match(start, line) for line in lines), start
