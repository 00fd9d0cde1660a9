"""Test `--archive DIR`, which keeps the documents, and `--input DIR`, which reads an archive."""

from __future__ import annotations

import errno
import json
import os
import sys

import lm_dataformat
import pytest

import prepare_data
from megatron.data.locks import try_lock
from tests.helpers import archives
from tests.helpers.commands import begin_and_pause, call, content

SUFFIXES = (".bin", ".idx")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return run(*arguments) -> (exit code, stderr) of prepare_data.py, with chunks of 4 KB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron.data.prepare.chunks.CHUNK_BYTES", 1 << 12)

    def call(*arguments: object) -> tuple[int, str]:
        flags = ["-d", ".", "--checkpoint-seconds", "0", "--workers", "1"]
        status = prepare_data.main([*flags, *map(str, arguments)])
        return status, capsys.readouterr().err

    return call


def kept_in(folder) -> list[tuple[str, dict]]:
    """Return (text, meta data) of each document, as the package itself reads them."""
    return list(lm_dataformat.Reader(str(folder)).stream_data(get_meta=True))


def damage(folder) -> str:
    """Cut the end off the fourth file of an archive, and return the file's name."""
    path = sorted(folder.iterdir())[3]
    path.write_bytes(path.read_bytes()[:-60])
    return path.name


def test_round_trip(run, tmp_path):
    """The archive has the documents with text in their order; read again, it gives the same shards.

    The run has more than ten chunks and so more than ten files, whose names sort in this order.
    """
    texts = archives.texts(120)
    metas = [{"pile_set_name": "AB"[n % 2], "n": [n, -0.1, None, "é\ud800"]} for n in range(120)]
    records = [{"text": text, "meta": meta} for text, meta in zip(texts, metas, strict=True)]
    records += [{"text": ["two", "paragraphs"]}, "a string"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "note.txt").write_text("\ufeffone file\n")
    assert run("--input", "in.jsonl", "note.txt", "--name", "one", "--archive", "kept")[0] == 0
    assert kept_in("kept") == [
        *((text, meta) for text, meta in zip(texts, metas, strict=True) if text),
        *((text, {}) for text in ("two\n\nparagraphs", "a string", "one file\n")),
    ]
    assert len(list((tmp_path / "kept").iterdir())) > 10
    assert not list(tmp_path.glob(".*"))
    flags = ["--workers", "2", "--partition", "1/1"]
    assert run("--input", "kept", "--name", "two", "--archive", "again", *flags)[0] == 0
    first, second = (content(f"{name}_text_document", SUFFIXES) for name in ("one", "two"))
    assert first == second
    assert kept_in("again") == kept_in("kept")

    run("--input", "kept", "--name", "a", "--pile-set", "A", "--on-error", "skip", "--archive", "A")
    assert kept_in("A") == [pair for pair in kept_in("kept") if pair[1].get("pile_set_name") == "A"]


def test_partitions_have_archives_of_their_own(run, tmp_path):
    archives.write_jsonl(tmp_path / "in.jsonl", texts := archives.texts(60))
    for index in (1, 2):
        job = ("--input", "in.jsonl", "--name", "x", "--partition", f"{index}/2")
        assert run(*job, "--archive", "kept/")[0] == 0
    folders = ["kept-00001-of-00002", "kept-00002-of-00002"]
    found = [text for folder in folders for text, _ in kept_in(folder)]
    assert found == [text for text in texts if text]


def test_killed_and_given_again(corpus, tmp_path):
    """A killed run leaves no archive; the next one completes it from what the first one kept."""
    kept, documents = tmp_path / "kept", archives.texts(600, 1) + archives.texts(600, 2)
    job = ["--input", corpus, "--name", "x", "-d", tmp_path, "--archive", kept, "--workers", 2]
    process = begin_and_pause(*job, at=4)
    process.kill()
    process.communicate()
    assert not kept.exists()
    before = sorted(path.name for path in (tmp_path / ".kept.part").glob("data_*"))
    assert len(before) == 4
    assert "going on after" in call(*job)
    assert [text for text, _ in kept_in(kept)] == [text for text in documents if text]
    assert sorted(path.name for path in kept.iterdir())[:4] == before


def test_a_full_disk(run, tmp_path, monkeypatch):
    """The error names the archive. With space again, the same command continues."""
    archives.write_jsonl(tmp_path / "in.jsonl", texts := archives.texts(60))
    job = ("--input", "in.jsonl", "--name", "x", "--archive", "kept")
    commit = lm_dataformat.Archive.commit

    def fail_at_the_third(archive, *name):
        if archive.i % 1000 == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        commit(archive, *name)

    with monkeypatch.context() as patch:
        patch.setattr(lm_dataformat.Archive, "commit", fail_at_the_third)
        status, error = run(*job)
    assert status == 1 and not (tmp_path / "kept").exists()
    assert f"{tmp_path}/kept: the archive cannot be written: [Errno 28] No space left" in error
    assert "the same command goes on after the first" in error
    assert run(*job)[0] == 0
    assert [text for text, _ in kept_in("kept")] == [text for text in texts if text]

    (tmp_path / "bad.jsonl").write_text("{")  # ends before anything could be continued
    assert run("--input", "bad.jsonl", "--name", "y", "--archive", "other")[0] == 1
    assert not list(tmp_path.glob("*other*"))


def test_what_stops_a_run_before_it_begins(run, tmp_path, monkeypatch):
    archives.write_jsonl(tmp_path / "in.jsonl", ["text"])
    job = ("--input", "in.jsonl", "--name", "x", "--archive", "kept")
    (tmp_path / "kept").mkdir()  # an empty folder may be used
    (tmp_path / ".kept.part").mkdir()
    lock = os.open(tmp_path / ".kept.part", os.O_RDONLY)
    assert try_lock(lock, wait=False)
    status, error = run(*job)
    assert status == 1 and "kept: another process is writing this archive" in error
    assert (tmp_path / ".kept.part").is_dir()
    os.close(lock)
    assert run(*job)[0] == 0

    status, error = run(*job, "--overwrite")
    assert status == 1 and "kept: exists already; name another folder as --archive" in error
    monkeypatch.setitem(sys.modules, "lm_dataformat", None)
    status, error = run("--input", "in.jsonl", "--name", "y", "--archive", "other")
    assert status == 1 and "--archive needs `pip install lm_dataformat`" in error
    with pytest.raises(SystemExit):
        run("builtin:python-stdlib", "--archive", "other")


def test_damaged_archives(run, tmp_path):
    """A damaged file is reported with its record; `skip` keeps the documents before the damage."""
    archives.write_jsonl(tmp_path / "in.jsonl", archives.texts(60))
    assert run("--input", "in.jsonl", "--name", "x", "--archive", "kept")[0] == 0
    before, name = kept_in("kept"), damage(tmp_path / "kept")
    status, error = run("--input", "kept", "--name", "y")
    assert status == 1 and f"kept/{name}:" in error and "is truncated or damaged" in error
    assert run("--input", "kept", "--name", "y", "--on-error", "skip", "--archive", "rest")[0] == 0
    rest = kept_in("rest")
    assert 0 < len(before) - len(rest) < len(before) / 4 and all(pair in before for pair in rest)


def test_another_key_than_text(run, tmp_path):
    archives.write_jsonl(tmp_path / "in.jsonl", archives.texts(9))
    assert run("--input", "in.jsonl", "--name", "x", "--archive", "kept")[0] == 0
    status, error = run("--input", "kept", "--name", "y", "--text-key", "body")
    assert status == 1 and "has no key 'body' (its keys: 'text', 'meta')" in error
