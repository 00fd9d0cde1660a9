"""Test partitions: of one archive, without documents, and missing ones among several corpora."""

from __future__ import annotations

import zipfile

import pytest

from megatron.data.errors import ShardError
from megatron.data.shards.joined import find_prefixes
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.byte_level import ByteLevelTokenizer
from tools import inspect_shards, merge_shards

GOOD = '{"text": "fine", "meta": {"pile_set_name": "ArXiv"}}\n'


def test_partitions_without_documents(tmp_path, run, capsys):
    """With one chunk, one of two partitions is empty and reported; merging empty ones fails."""
    out, path = tmp_path / "out", tmp_path / "a.jsonl"
    path.write_text(GOOD)
    text = [run([path], "--partition", f"{part}/2") for part in (1, 2)]
    assert "partition 1/2 of" in text[0] and "no document" in text[0]
    assert "no document" not in text[1]
    prefixes = find_prefixes(out / "x-*_text_document")
    assert inspect_shards.main([prefixes[0]]) == 0
    assert merge_shards.main([*prefixes, str(out / "merged")]) == 0
    assert len(ShardReader(out / "merged")) == 1

    path.write_text('{"text": ""}\n')
    for part in (1, 2):
        run([path], "--partition", f"{part}/2", name="blank")
    capsys.readouterr()
    assert merge_shards.main([str(out / "blank-*_text_document"), str(out / "none")]) == 1
    assert "no document in them; nothing is written" in capsys.readouterr().err
    assert not list(out.glob("none*"))


def test_a_glob_wants_all_partitions(tmp_path, run):
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD)
    run([path], "--partition", "2/3")
    run([path], "--partition", "3/3", "--workers", 1)
    with pytest.raises(ShardError, match="partition 1 of 3 is missing; prepare it, or name"):
        find_prefixes(tmp_path / "out" / "x-*_text_document")
    one_by_one = [tmp_path / "out" / f"x-0000{part}-of-00003_text_document" for part in (2, 3)]
    assert find_prefixes(one_by_one) == list(map(str, one_by_one))
    for part in (1, 2, 3):
        run([path], "--partition", f"{part}/3", name="y")
    with pytest.raises(ShardError, match="partition 1 of 3 is missing"):
        find_prefixes(tmp_path / "out" / "*_text_document")  # of one of two corpora
    run([path], "--partition", "1/3")
    assert len(find_prefixes(tmp_path / "out" / "x-*_text_document")) == 3
    assert len(find_prefixes(tmp_path / "out" / "*_text_document")) == 6


def test_partitions_of_a_zip_whose_directory_is_in_another_order(tmp_path, run):
    path = tmp_path / "a.zip"
    texts = [chr(97 + i) * 300_000 for i in range(4)]
    with zipfile.ZipFile(path, "w") as archive:
        for i, text in enumerate(texts):
            archive.writestr(f"{i}.txt", text)
        archive.filelist.reverse()
    parts = [tmp_path / "out" / f"x-0000{part}-of-00002_text_document" for part in (1, 2)]
    for part in (1, 2):
        run([path], "--partition", f"{part}/2")
    found = [reader.get(i) for reader in map(ShardReader, parts) for i in range(len(reader))]
    encode = ByteLevelTokenizer()
    assert [encode.decode(each[:-1]) for each in found] == texts
