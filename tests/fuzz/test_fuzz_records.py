"""Damaged records of a run: `kerple.json`, `latest` and `metrics.jsonl`."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import example, given

from megatron.engine.checkpoint import checksums
from megatron.engine.checkpoint.record import Record
from megatron.engine.checkpoint.saved_checkpoints import Saved, finished
from megatron.engine.errors import CheckpointError
from megatron.engine.run_log.log import RunLog
from megatron.run_folder import RunFolder
from tests.fuzz.damage import FOLDER, damaged, in_time
from tests.helpers.paths import FIXTURES

ALONE = cast(Any, SimpleNamespace(rank=0, world_size=1, gather_from_job=lambda found: [found]))
CHECKPOINT = FIXTURES / "checkpoint/run/global_step3"
COPY = FOLDER / "run/global_step3"
shutil.copytree(CHECKPOINT, COPY)
(FOLDER / "run/global_step²").mkdir()
WRITTEN = (CHECKPOINT / "kerple.json").read_bytes()
ROWS = b'{"step": 1, "train/loss": 2.5}\n{"step": 2, "train/loss": 2.25}\n{"step": 3, "x": 0}\n'


@given(damaged([WRITTEN], most=2))
@example(WRITTEN)
@example(b"[" * 3000 + b"]" * 3000)
@example(b'{"progress": ' + b"1" * 5000 + b"}")
@example(WRITTEN.replace(b'"checksum"', b'"checksun"'))
def test_a_record(content: bytes) -> None:
    """Any change that is more than white space is seen by the checksum or by the reader."""
    (COPY / "kerple.json").write_bytes(content)
    with in_time():
        damage = checksums.damage(COPY, ALONE)
        assert damage is None or str(COPY) in damage
        try:
            Record.read(COPY)
        except CheckpointError as error:
            assert str(COPY) in str(error)
            return
    assert damage or json.loads(content) == json.loads(WRITTEN)


@given(damaged([b"global_step3", b"global_step3\n", b"../run/global_step3", b".."]))
@example(b"g" * 5000)
@example(b"global_step3\0")
@example(b".")
def test_latest(content: bytes) -> None:
    (FOLDER / "run/latest").write_bytes(content)
    tag, problem = RunFolder(FOLDER / "run").newest_tag()
    saved = Saved(FOLDER / "run", tag) if tag else None
    assert [each.tag for each in finished(FOLDER / "run")] == ["global_step3"]
    if saved is None:
        assert str(FOLDER / "run/latest") in problem
    else:
        assert saved.path.is_dir() and saved.path.parent == FOLDER / "run"
        assert saved.tag.encode() == content.strip() and saved.tag.startswith("global_step")


@given(damaged([ROWS]))
@example(ROWS)
@example(b'{"step": ' + b"[" * 3000 + b"]" * 3000 + b"}\n" + ROWS)
@example(b'{"step": ' + b"1" * 5000 + b"}\n" + ROWS)
@example(b'{"step": NaN}\n{"step": "1"}\n{"step": null}\n{"step": [1]}\n["step"]\n' + ROWS)
@example(b'{"step": 1, "\xff": 2}\n')
def test_metrics(content: bytes) -> None:
    """A resumed run drops the rows that it will write again, and those that are no rows."""
    path = FOLDER / "metrics.jsonl"
    path.write_bytes(content)
    read = list(RunFolder(FOLDER).metrics_rows())
    assert read == [*RunFolder(FOLDER).metrics_rows(newest_first=True)][::-1]
    with in_time(), RunLog(FOLDER, is_main=True, append=True, last_step=2) as log:
        log.metrics(3, {"train/loss": 2.0})
    *rows, last = [json.loads(line) for line in path.read_text().splitlines()]
    assert last.pop("time") and last.pop("elapsed_seconds") >= 0
    assert last == {"step": 3, "train/loss": 2.0} and all(row["step"] <= 2 for row in rows)
    assert rows == [row for row in read if row["step"] <= 2] or "final/" in str(read)
    if content == ROWS:
        assert [row["step"] for row in rows] == [1, 2]
