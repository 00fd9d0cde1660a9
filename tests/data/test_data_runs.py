"""prepare_data.py as real processes: killed, out of disk, out of workers, fed with faults."""

from __future__ import annotations

import gzip
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import archives  # noqa: E402

from megatron.data.joined import find_prefixes  # noqa: E402
from megatron.data.mmap import MMapIndexedDataset  # noqa: E402

ROOT = Path(__file__).parents[2]
SUFFIXES = (".bin", ".idx")


def command(*arguments: object, script: str = "prepare_data.py") -> list[str]:
    return [sys.executable, str(ROOT / script), *map(str, arguments)]


def call(*arguments: object, code: int = 0, script: str = "prepare_data.py", **options) -> str:
    done = subprocess.run(
        command(*arguments, script=script), capture_output=True, text=True, timeout=120, **options
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def content(prefix: str | Path) -> dict[str, bytes]:
    return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in SUFFIXES}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Seven chunks of text in two files, one of them compressed."""
    folder = tmp_path_factory.mktemp("corpus")
    archives.lmd_archive(folder, archives.texts(1800, 1))[0].rename(folder / "a.jsonl.zst")
    archives.write_jsonl(folder / "b.jsonl", archives.texts(1800, 2))
    return folder


@pytest.fixture(scope="module")
def unbroken(corpus, gpt2_files, tmp_path_factory) -> tuple[list, dict[str, bytes]]:
    """(arguments that name input and tokenizer, the files of a run left alone)."""
    folder = tmp_path_factory.mktemp("unbroken")
    arguments = ["--input", corpus, "-t", "GPT2BPETokenizer"]
    arguments += ["-v", gpt2_files[0], "-m", gpt2_files[1], "--backend", "tokenizers"]
    call(*arguments, "--name", "x", "-d", folder, "--workers", 1)
    return arguments, content(folder / "x_text_document")


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def begin(*arguments: object) -> subprocess.Popen:
    """Start a run that keeps a journal after every chunk."""
    return subprocess.Popen(
        command(*arguments, "--checkpoint-seconds", 0),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(path: Path, least: int, process: subprocess.Popen) -> None:
    while not path.exists() or path.stat().st_size <= least:
        assert process.poll() is None, "ended before it could be killed"
        time.sleep(0.005)


def test_killed_and_given_again(unbroken, tmp_path):
    """Kill -9 at two moments, with different numbers of workers: the same bytes at the end."""
    arguments, expected = unbroken
    run = [*arguments, "--name", "x", "-d", tmp_path]
    journal, part = tmp_path / "x_text_document.journal", tmp_path / "x_text_document.bin.part"
    reached = 0
    for workers in (2, 1):
        process = begin(*run, "--workers", workers)
        wait_for(journal, 0, process)
        wait_for(part, reached, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not list(tmp_path.glob("*.idx")) and not list(tmp_path.glob("*.bin"))
        reached = part.stat().st_size
    text = call(*run, "--workers", 2)
    assert "going on after" in text
    assert content(tmp_path / "x_text_document") == expected
    names = [f"x_text_document{suffix}" for suffix in (".bin", ".idx", ".json")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_output_does_not_depend_on_workers_or_backend(unbroken, tmp_path):
    arguments, expected = unbroken
    for name, extra in (("a", ["--workers", 3]), ("b", ["--backend", "auto", "--workers", 2])):
        text = call(*arguments, "--name", name, "-d", tmp_path, *extra)
        assert "documents/s" in text and "MB/s of text" in text
        assert content(tmp_path / f"{name}_text_document") == expected


def test_partitions_joined_are_the_whole(unbroken, tmp_path):
    arguments, expected = unbroken
    for part in (1, 2, 3):
        call(*arguments, "--name", "x", "-d", tmp_path, "--partition", f"{part}/3")
    pattern = tmp_path / "x-0000?-of-00003_text_document"
    assert len(find_prefixes(pattern)) == 3
    assert min(len(MMapIndexedDataset(prefix)) for prefix in find_prefixes(pattern)) > 500
    text = call(pattern, tmp_path / "whole", script="tools/merge_shards.py")
    assert f"data_path: {tmp_path}/whole" in text
    assert content(tmp_path / "whole") == expected
    second = find_prefixes(pattern)[1]
    for suffix in (".bin", ".idx", ".json"):
        Path(f"{second}{suffix}").unlink()
    text = call(pattern, tmp_path / "hole", code=1, script="tools/merge_shards.py")
    assert "not all partitions of one run, in order: found ['1/3', '3/3']" in text
    assert not list(tmp_path.glob("hole*"))


def test_a_full_disk(unbroken, tmp_path):
    """Here a limit on file size; the same command goes on once there is room."""
    arguments, expected = unbroken
    run = [*arguments, "--name", "x", "-d", tmp_path, "--workers", 2]
    room = len(expected[".bin"]) // 2

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    text = call(*run, "--checkpoint-seconds", 0, code=1, preexec_fn=limit)
    assert "error: [Errno 27] File too large" in text
    assert "the same command goes on after the first " in text
    assert not list(tmp_path.glob("*.idx"))
    assert "going on after" in call(*run)
    assert content(tmp_path / "x_text_document") == expected


def test_workers_die_with_their_parent(unbroken, tmp_path):
    process = begin(*unbroken[0], "--name", "x", "-d", tmp_path, "--workers", 2)
    wait_for(tmp_path / "x_text_document.journal", 0, process)
    workers = children(process.pid)
    assert len(workers) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "a worker outlives the run"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


FAULTS = {
    "json": "json.jsonl:4: is not JSON",
    "key": "key.jsonl:2: has no key 'text'",
    "utf8": "utf8.jsonl:2: byte 0xe9 is not valid UTF-8",
    "empty": "empty.jsonl: is empty",
    "blank": "no document with text in it; nothing is written",
    "zst": "cut.jsonl.zst:",
    "tar": "cut.jsonl.zst.tar!data_",
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_faults_are_errors_with_file_and_record(tmp_path, fault):
    (tmp_path / "owt").mkdir()
    path = archives.make_faults(tmp_path)[fault]
    out = tmp_path / "out"
    text = call("--input", path, "--name", "x", "-d", out, "--workers", 2, code=1)
    assert "error: " in text and FAULTS[fault] in text
    assert not out.exists() or not list(out.iterdir())


def test_skipped_faults_are_counted_and_listed(tmp_path):
    (tmp_path / "owt").mkdir()
    made = archives.make_faults(tmp_path)
    chosen = [made[name] for name in ("json", "key", "utf8", "zst", "tar")]
    text = call(
        "--input", *chosen, "--name", "x", "-d", tmp_path, "--on-error", "skip", "--workers", 2
    )
    assert "skipped 5 faulty records" in text
    listed = (tmp_path / "x_text_document.skipped.txt").read_text().splitlines()
    assert [any(FAULTS[name] in line for line in listed) for name in ("json", "zst", "tar")]
    assert len(listed) == 5 and all(str(tmp_path) in line for line in listed)
    shards = MMapIndexedDataset(tmp_path / "x_text_document")
    # The whole records around a bad one are kept, and those before a truncation.
    assert 7 < len(shards) < 7 + 600


def test_gpt_neox_flags_give_gpt_neox_files(parity, gpt2_files, tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(
        gzip.decompress((parity / "corpus.jsonl.gz").read_bytes())
    )
    text = call(
        *("--input", tmp_path / "corpus.jsonl", "--output-prefix", tmp_path / "corpus"),
        *("--vocab-file", gpt2_files[0], "--merge-file", gpt2_files[1]),
        *("--tokenizer-type", "GPT2BPETokenizer", "--dataset-impl", "mmap", "--append-eod"),
        *("--workers", 2, "--num-docs", 210, "--jsonl-keys", "text"),
        script="tools/preprocess_data.py",
    )
    assert "Vocab size: 50257" in text
    assert content(tmp_path / "corpus_text_document") == content(parity / "corpus_text_document")
