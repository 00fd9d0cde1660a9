"""Test prepare_data.py as real processes: workers, partitions, faults, gpt-neox's flags."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from megatron.data.shards.joined import find_prefixes
from megatron.data.shards.reader import ShardReader
from tests.helpers import archives
from tests.helpers.commands import call, content

TOKENS = (".bin", ".idx")


def test_output_does_not_depend_on_workers_or_backend(unbroken, tmp_path):
    arguments, expected = unbroken
    for name, backend, workers in (("a", "tokenizers", 3), ("b", "auto", 2)):
        flags = ["--backend", backend, "--workers", workers]
        text = call(*arguments, "--name", name, "-d", tmp_path, *flags)
        assert re.search(r"B \| [\d.]+[kM]?B/s \| ETA \d\d:\d\d", text)
        assert content(tmp_path / f"{name}_text_document") == expected


def test_joined_partitions_are_the_unpartitioned_data_set(unbroken, tmp_path):
    arguments, expected = unbroken
    for part in (1, 2, 3):
        call(*arguments, "--name", "x", "-d", tmp_path, "--partition", f"{part}/3")
    pattern = tmp_path / "x-0000?-of-00003_text_document"
    assert len(find_prefixes(pattern)) == 3
    assert min(len(ShardReader(prefix)) for prefix in find_prefixes(pattern)) > 150
    text = call(pattern, tmp_path / "whole", script="tools/merge_shards.py")
    assert f"data_path: {tmp_path}/whole" in text
    for suffix, data in content(tmp_path / "whole", TOKENS).items():
        assert data == expected[suffix]
    second = find_prefixes(pattern)[1]
    for suffix in (".bin", ".idx", ".json"):
        Path(f"{second}{suffix}").unlink()
    text = call(pattern, tmp_path / "hole", code=1, script="tools/merge_shards.py")
    assert "partition 2 of 3 is missing; prepare it, or name the prefixes" in text
    assert not list(tmp_path.glob("hole*"))


FAULTS = {
    "json": "json.jsonl:4: is not JSON",
    "key": "key.jsonl:2: has no key 'text'",
    "utf8": "utf8.jsonl:2: byte 0xe9 is not valid UTF-8",
    "empty": "empty.jsonl: is empty",
    "blank": "blank.jsonl: no document with text in it; nothing is written",
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
    shards = ShardReader(tmp_path / "x_text_document")
    # The good records around a bad one are kept, and those before a truncation.
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
        script="tools/datasets/preprocess_data.py",
    )
    assert "Vocab size: 50257" in text
    made = content(tmp_path / "corpus_text_document", TOKENS)
    assert made == content(parity / "corpus_text_document", TOKENS)
