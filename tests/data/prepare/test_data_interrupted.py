"""Test runs of prepare_data.py that are paused, and then killed or stopped."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import prepare_data
from megatron.data.shards.reader import ShardReader
from megatron.data.shards.writer import ShardWriter
from tests.helpers.commands import ROOT, alive, begin_and_pause, call, content


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 120
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "a worker is alive after the run"
        time.sleep(0.02)


def test_killed_and_given_again(unbroken, tmp_path):
    """After kill -9 at two moments and other numbers of workers, the final bytes are the same."""
    arguments, expected = unbroken
    run = [*arguments, "--name", "x", "-d", tmp_path]
    for workers, at in ((2, 4), (1, 9)):
        process = begin_and_pause(*run, "--workers", workers, at=at)
        process.kill()
        process.communicate()
        left = {path.name.partition("_document")[2] for path in tmp_path.iterdir()}
        assert left == {".bin.part", ".idx.part", ".journal", ".skipped.txt.part"}
    text = call(*run, "--workers", 2)
    assert "going on after" in text
    assert content(tmp_path / "x_text_document") == expected
    names = [f"x_text_document{suffix}" for suffix in (".bin", ".idx", ".json")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_given_again_with_something_changed(unbroken, corpus, tmp_path):
    """After other options or another input, the run starts over and prints why."""
    arguments, expected = unbroken
    for name in ("a.jsonl.zst", "b.jsonl"):
        (tmp_path / name).write_bytes((corpus / name).read_bytes())
    run = ["--input", tmp_path / "a.jsonl.zst", tmp_path / "b.jsonl", *arguments[2:]]
    run += ["--name", "x", "-d", tmp_path, "--workers", 2]

    def kill(*flags: str) -> None:
        process = begin_and_pause(*run, *flags, at=4)
        process.kill()
        process.communicate()

    kill("--no-append-eod")
    text = call(*run)
    assert "x_text_document.journal: is of a run with other options; starting over" in text
    assert content(tmp_path / "x_text_document", (".bin", ".idx")) == {
        suffix: expected[suffix] for suffix in (".bin", ".idx")
    }
    kill("--overwrite")
    os.utime(tmp_path / "b.jsonl", (0, 0))
    text = call(*run, "--overwrite")
    assert "x_text_document.journal: is of a run with other sources; starting over" in text
    kill("--overwrite")
    os.truncate(tmp_path / "x_text_document.bin.part", 10)
    text = call(*run, "--overwrite")
    assert "counts more than the .part files hold; starting over" in text
    kill("--overwrite")
    (tmp_path / "x_text_document.journal").write_text("{")
    text = call(*run, "--overwrite", "--backend", "tokenizers", "--on-error", "skip")
    assert "is not a journal" in text and "starting over" in text
    assert content(tmp_path / "x_text_document", (".bin",))[".bin"] == expected[".bin"]


def test_a_full_disk(unbroken, tmp_path):
    """A limit on file sizes simulates a full disk; with space, the same command continues."""
    arguments, expected = unbroken
    run = [*arguments, "--name", "x", "-d", tmp_path, "--workers", 2]
    room = len(expected[".bin"]) // 2

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    text = call(*run, "--checkpoint-seconds", 0, code=1, preexec_fn=limit)
    assert f"error: {tmp_path}/x_text_document: [Errno 27] File too large; the same" in text
    assert "the same command goes on after the first " in text
    assert not list(tmp_path.glob("*.idx"))
    assert "going on after" in call(*run)
    assert content(tmp_path / "x_text_document") == expected


def test_a_worker_that_dies(unbroken, tmp_path):
    arguments, expected = unbroken
    run = [*arguments, "--name", "x", "-d", tmp_path, "--workers", 2]
    process = begin_and_pause(*run, at=5)
    workers = children(process.pid)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    _, text = process.communicate("go on\n", timeout=240)
    assert process.returncode == 1
    assert "error: a worker process died (killed by SIGKILL" in text
    assert "the same command goes on after the first " in text and "Traceback" not in text
    assert not list(tmp_path.glob("*.idx"))
    wait_for_end(workers)
    call(*run)
    assert content(tmp_path / "x_text_document") == expected


def test_workers_die_with_their_parent(unbroken, tmp_path):
    process = begin_and_pause(*unbroken[0], "--name", "x", "-d", tmp_path, "--workers", 2, at=1)
    workers = children(process.pid)
    assert len(workers) == 2 and all(map(alive, workers))
    process.kill()
    process.communicate()
    wait_for_end(workers)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_told_to_end(unbroken, tmp_path, number):
    """Ctrl-C reaches all processes of a terminal, but only the parent prints a message."""
    arguments, expected = unbroken
    run = [*arguments, "--name", "x", "-d", tmp_path, "--workers", 2]
    process = begin_and_pause(*run, at=3)
    workers = children(process.pid)
    for pid in [*workers, process.pid]:
        os.kill(pid, number)
    _, text = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "the same command goes on" in text and "Traceback" not in text
    wait_for_end(workers)
    assert "going on after" in call(*run)
    assert content(tmp_path / "x_text_document") == expected


# Prints the peak resident KiB of the run and of its largest worker. (Not ru_maxrss of the run
# itself: that begins with the size of the process that started it.)
PEAK = """
import re, resource, sys
from megatron.data.prepare import chunks
chunks.CHUNK_BYTES = 1 << 16
import prepare_data
assert prepare_data.main(sys.argv[1:]) == 0
own = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
print("peak", own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def write_input(path: Path, megabytes: int) -> None:
    """Write short documents; for parquet, long incompressible ones, with row groups of 1 MB."""
    if path.suffix == ".jsonl":
        line = '{"text": "some words in a row, about as long as a line of prose"}\n'
        path.write_text(line * (megabytes * 10**6 // len(line)))
        return
    import pyarrow
    import pyarrow.parquet

    rng = random.Random(0)
    with pyarrow.parquet.ParquetWriter(path, pyarrow.schema({"text": pyarrow.string()})) as out:
        for _ in range(megabytes):
            out.write_table(
                pyarrow.table({"text": [rng.randbytes(500).hex() for _ in range(1000)]})
            )


@pytest.mark.parametrize(("kind", "workers"), [("jsonl", 1), ("jsonl", 2), ("parquet", 1)])
def test_memory_does_not_grow_with_the_input(tmp_path, kind, workers):
    """Compare the peak memory for inputs of 4 MB and 24 MB.

    At most six chunks of 64 KB are in progress, which need less than 2 MB with their tokens. The
    allocator's share of the peak varies by 3 MB between runs. If the text were kept, the peaks
    would differ by 20 MB. If one Python integer per document were kept, they would differ by 9 MB.
    """
    peaks = []
    for megabytes in (4, 24):
        path = tmp_path / f"{megabytes}.{kind}"
        write_input(path, megabytes)
        name = f"n{megabytes}"
        arguments = ["--input", path, "--name", name, "-d", tmp_path, "--workers", workers]
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *map(str, arguments)],
            cwd=ROOT, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        peaks.append(list(map(int, done.stdout.split("peak")[1].split())))
    for small, large in zip(*peaks, strict=True):
        assert large < small + 7_000, peaks


def test_the_chunk_that_a_fault_cut_off_is_read_again(tmp_path, capsys):
    """A journal after each chunk, and the flag that the error names: no document is lost."""
    (tmp_path / "in").mkdir()
    sizes = [100, 100, 100, 5000, 100, 100]
    for number, size in enumerate(sizes):
        (tmp_path / "in" / f"{number}.txt").write_text(f"{number}" * size)
    run = ["--input", tmp_path / "in", "--name", "x", "-d", tmp_path, "--checkpoint-seconds", 0]
    run = [*map(str, [*run, "--workers", 1])]
    assert prepare_data.main([*run, "--max-document-bytes", "1000"]) == 1
    assert "larger --max-document-bytes" in capsys.readouterr().err
    assert prepare_data.main([*run, "--max-document-bytes", "10000"]) == 0
    found = ShardReader(tmp_path / "x_text_document").sizes
    assert [*found] == [size + 1 for size in sizes]


def test_a_full_disk_at_the_end_leaves_the_list_of_skipped_records(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nbad line\n{"text": "b"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "c"}\n')  # a second chunk, so there is a journal
    run = [
        "--input",
        tmp_path / "a.jsonl",
        tmp_path / "b.jsonl",
        "--name",
        "x",
        "-d",
        tmp_path,
        "--on-error",
        "skip",
    ]
    run = [*map(str, [*run, "--checkpoint-seconds", 0])]

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finalize", full)
        assert prepare_data.main(run) == 1
    assert prepare_data.main(run) == 0
    (line,) = (tmp_path / "x_text_document.skipped.txt").read_text().splitlines()
    assert line.startswith(f"{tmp_path / 'a.jsonl'}:2: ")
