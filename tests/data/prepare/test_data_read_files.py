"""Test every kind of input: it is read as its own library reads it, and damage is an error."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import zipfile
from pathlib import Path

import lm_dataformat
import numpy as np
import pytest
import zstandard

from megatron.data.errors import CorpusError
from megatron.data.prepare.chunks import CHUNK_BYTES, Place, line_chunks
from megatron.data.prepare.encode import EncodeOptions
from megatron.data.prepare.sources import find_sources, kind_of
from megatron.data.prepare.text_to_shards import Preparation
from megatron.data.shards.manifest import read_manifest
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.build import build_tokenizer
from tests.helpers import archives

BYTES = build_tokenizer("ByteLevelTokenizer")
DOCUMENTS = archives.texts(120)
KEPT = [text for text in DOCUMENTS if text]


def prepared(tmp_path: Path, *inputs, on_error="stop", **encode) -> list[str]:
    """Prepare shards of `inputs`; return their documents, decoded."""
    encode = EncodeOptions(**encode)
    Preparation(find_sources(inputs), [tmp_path / "out"], BYTES, encode, 1, on_error).run()
    shards = ShardReader(tmp_path / "out")
    return [BYTES.decode(shards.get(i)[:-1]) for i in range(len(shards))]


@pytest.mark.parametrize("layout", sorted(archives.LAYOUTS))
def test_the_original_layouts(tmp_path, layout):
    path = archives.LAYOUTS[layout](tmp_path, DOCUMENTS)
    assert prepared(tmp_path, path) == KEPT
    [file] = read_manifest(tmp_path / "out")["source"]["files"]
    assert file["bytes"] == path.stat().st_size and len(file["sha256"]) == 64
    if layout != "openwebtext2":  # lm_dataformat 0.0.20 itself fails on its own .jsonl.zst.tar
        theirs = list(lm_dataformat.Reader(str(path)).stream_data())
        assert [text for text in theirs if text] == KEPT


def lines(documents=DOCUMENTS) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()


def frames(content: bytes) -> bytes:
    """Compress `content` to zstandard data with several frames, as in concatenated files."""
    cut = content.index(b"\n", len(content) // 2) + 1
    packer = zstandard.ZstdCompressor()
    return packer.compress(content[:cut]) + packer.compress(content[cut:])


def as_dat(path: Path) -> Path:
    archive = lm_dataformat.DatArchive(str(path.parent / "dat"))
    for text in DOCUMENTS:
        archive.add_data(text)
    archive.commit("x")
    return next((path.parent / "dat").iterdir()).rename(path)


def as_zip(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("folder/", "")
        half = len(DOCUMENTS) // 2
        for i, text in enumerate(DOCUMENTS[:half]):
            archive.writestr(f"folder/{i:03}.txt", text)
        archive.writestr("rest.jsonl", lines(DOCUMENTS[half:]))
    return path


def as_parquet(path: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    rows = {"id": list(range(len(DOCUMENTS))), "text": DOCUMENTS}
    pyarrow.parquet.write_table(pyarrow.table(rows), path, row_group_size=50)
    return path


def written(content: bytes):
    return lambda path: (path.write_bytes(content), path)[1]


KINDS = {
    "a.jsonl": written(lines()),
    "a.jsonl.gz": lambda path: archives.gz(path, lines()),
    "a.json.gz": lambda path: archives.gz(path, lines()),
    "a.jsonl.zst": written(frames(lines())),
    "a.jsonl.xz": written(lzma.compress(lines())),
    "a.ndjson.bz2": written(bz2.compress(lines())),
    "a.dat.zst": as_dat,
    "a.zip": as_zip,
    "a.parquet": as_parquet,
    "a.tar": lambda path: archives.tar_of(path, [("a.jsonl.gz", gzip.compress(lines()))]),
}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_other_kinds(tmp_path, name):
    assert prepared(tmp_path, KINDS[name](tmp_path / name)) == KEPT


def test_records_as_lm_dataformat_reads_them(tmp_path):
    path = tmp_path / "a.jsonl"
    records = [{"text": ["one", "two"], "meta": {}}, "a bare string", {"text": "last"}]
    path.write_text("\n".join(map(json.dumps, records)))
    expected = ["one\n\ntwo", "a bare string", "last"]
    assert list(lm_dataformat.Reader(str(path)).stream_data()) == expected
    assert prepared(tmp_path, path) == expected


def test_a_folder_of_source_files(tmp_path):
    root = tmp_path / "src"
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / ".git/config").write_text("hidden")
    (root / "__pycache__").mkdir()
    (root / "__pycache__/a.pyc").write_bytes(b"\0")
    (root / "b.c").write_text("int x;")
    (root / "a.py").write_text("x = 1\n")
    (root / "sub/empty.py").write_text("")
    (root / "sub/records.jsonl").write_text('{"text": "record"}\n')
    (root / "z").write_text("no suffix")
    assert prepared(tmp_path, root) == ["x = 1\n", "int x;", "record", "no suffix"]
    manifest = read_manifest(tmp_path / "out")
    assert [file.get("files") for file in manifest["source"]["files"]] == [3, None, None]
    assert manifest["empty_documents"] == 1


def test_globs_in_order_and_hidden_mistakes(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    assert prepared(tmp_path, tmp_path / "*.txt") == ["a", "b", "c"]
    with pytest.raises(CorpusError, match=r"x\*\.txt: matches no file"):
        find_sources([tmp_path / "x*.txt"])
    (tmp_path / "e.jsonl").touch()
    with pytest.raises(CorpusError, match=r"e\.jsonl: is empty\n.*/n\.txt: no such file"):
        find_sources([tmp_path / "e.jsonl", tmp_path / "n.txt"])


def test_a_folder_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    """This includes inner folders, whose files would otherwise be left out silently."""
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("a")
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    for folder in (tmp_path, tmp_path / "closed"):
        with pytest.raises(CorpusError, match=r"^[^\n]*/closed: Permission denied$"):
            find_sources([folder])


def test_sets_of_the_pile(tmp_path):
    path = tmp_path / "00.jsonl"
    sets = ["ArXiv", "Github", "ArXiv", "OpenWebText2"]
    records = [{"text": f"{i}", "meta": {"pile_set_name": name}} for i, name in enumerate(sets)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert prepared(tmp_path, path, pile_sets=("ArXiv", "Github")) == ["0", "1", "2"]
    assert read_manifest(tmp_path / "out")["left_out_by_set"] == 1
    path.write_text('{"text": "a", "meta": {}}\n')
    with pytest.raises(CorpusError, match=r"00\.jsonl:1: has no meta\.pile_set_name"):
        prepared(tmp_path, path, pile_sets=("ArXiv",))


def test_several_keys_and_ftfy(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "schÃ¶n", "code": "x"}\n{"text": "two", "code": ""}\n')
    options = EncodeOptions(("text", "code"), ftfy=True)
    prefixes = [tmp_path / "t", tmp_path / "c"]
    first, second = Preparation(find_sources([path]), prefixes, BYTES, options).run()
    shards = [ShardReader(prefix) for prefix in prefixes]
    decoded = [[BYTES.decode(s.get(i)[:-1]) for i in range(len(s))] for s in shards]
    assert decoded == [["schön", "two"], ["x"]]
    assert (first["documents"], second["documents"], second["source"]["key"]) == (2, 1, "code")


def test_a_data_set_of_the_hub_library(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": DOCUMENTS}).save_to_disk(tmp_path / "set")
    assert prepared(tmp_path, tmp_path / "set") == KEPT
    [source] = read_manifest(tmp_path / "out")["source"]["files"]
    assert source["rows"] == len(DOCUMENTS) and source["fingerprint"]


def test_chunks_depend_on_the_content_alone():
    class Slow(io.RawIOBase):
        """A stream that returns pieces of varying sizes."""

        def __init__(self, content):
            self.content, self.step = content, 0

        def readable(self):
            return True

        def readinto(self, buffer):
            self.step = self.step % 7919 + 1
            size = min(self.step, len(buffer))
            piece, self.content = self.content[:size], self.content[size:]
            buffer[: len(piece)] = piece
            return len(piece)

    content = lines(archives.texts(3000)) + b'{"text": "' + b"x" * 3 * CHUNK_BYTES + b'"}\n{}'
    fast = list(line_chunks(io.BufferedReader(io.BytesIO(content)), Place("a")))
    assert fast == list(line_chunks(io.BufferedReader(Slow(content)), Place("a")))
    assert b"".join(chunk.lines for chunk in fast) == content and len(fast) > 3
    firsts = np.cumsum([1] + [chunk.lines.count(b"\n") for chunk in fast])[:-1]
    assert [chunk.first for chunk in fast] == firsts.tolist()


def truncated(content: bytes, keep: float) -> bytes:
    return content[: int(len(content) * keep)]


def damaged(tmp_path: Path, name: str) -> Path:
    """Write a truncated or damaged input of the kind `name`, and return its path."""
    path = tmp_path / name
    if name.startswith("end-"):  # all members complete, the end mark missing
        archives.tar_of(path, [("a.txt", b"x" * 512)])
        path.write_bytes(path.read_bytes()[: 512 * 3])
    elif name.startswith("bits-"):
        whole = bytearray(KINDS["a.zip"](path).read_bytes())
        whole[len(whole) // 3] ^= 255
        path.write_bytes(whole)
    elif name == "a.tar.gz":
        whole = archives.arxiv(tmp_path, DOCUMENTS).read_bytes()
        path.write_bytes(truncated(whole, 0.7))
    elif name == "b.tar":
        whole = archives.openwebtext2(tmp_path, DOCUMENTS).read_bytes()
        path.write_bytes(truncated(whole, 0.5))
    else:
        path.write_bytes(truncated(KINDS[name](path).read_bytes(), 0.9))
    return path


@pytest.mark.parametrize(
    "name, where",
    [
        ("a.jsonl.gz", r"a\.jsonl\.gz:1\d\d: is truncated or damaged"),
        ("a.jsonl.zst", r"a\.jsonl\.zst:\d+: is truncated or damaged: .*before the end"),
        ("a.jsonl.xz", r"a\.jsonl\.xz:\d+: is truncated or damaged"),
        ("a.ndjson.bz2", r"a\.ndjson\.bz2:\d+: is truncated or damaged"),
        ("a.dat.zst", r"a\.dat\.zst(:\d+)?: is truncated or damaged"),
        ("a.tar.gz", r"a\.tar\.gz!papers/\d+\.tex: is truncated or damaged"),
        ("b.tar", r"b\.tar!data_\d.*\.jsonl\.zst(:\d+)?: is truncated or damaged"),
        ("end-a.tar", r"end-a\.tar.*: is truncated .*without its end mark"),
        ("a.zip", r"a\.zip: is truncated or damaged: File is not a zip"),
        ("bits-a.zip", r"bits-a\.zip!.*: is truncated or damaged"),
        ("a.parquet", r"a\.parquet:1: is truncated or damaged"),
    ],
)
def test_damaged_files_are_errors(tmp_path, name, where):
    path = damaged(tmp_path, name)
    with pytest.raises(CorpusError, match=where):
        prepared(tmp_path, path)
    assert not list(tmp_path.glob("out*"))


def test_skipping_keeps_what_came_before(tmp_path):
    bad, good = damaged(tmp_path, "a.jsonl.gz"), tmp_path / "b.txt"
    good.write_text("after")
    found = prepared(tmp_path, bad, good, on_error="skip")
    assert found[-1] == "after" and found[:-1] == KEPT[: len(found) - 1] and len(found) > 90
    [line] = (tmp_path / "out.skipped.txt").read_text().splitlines()
    assert "a.jsonl.gz:" in line and "truncated" in line
    assert read_manifest(tmp_path / "out")["source"]["skipped"] == 1


def test_every_kind_of_the_table_is_known():
    from megatron.data.prepare import sources

    for suffix, kind in sources.KINDS.items():
        assert kind_of(f"a{suffix}") == kind
        packed = None if kind in ("zip", "parquet") else kind
        assert kind_of(f"A{suffix}.ZST") == packed
