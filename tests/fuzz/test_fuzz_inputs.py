"""Damaged inputs of data preparation: what is read without a fault is what other readers find."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import example, given

from megatron.data.errors import CorpusError
from megatron.data.prepare.chunks import Fault, Limits
from megatron.data.prepare.encode import EncodeOptions, Encoder
from megatron.data.prepare.read_files import read_source
from megatron.data.prepare.sources import find_sources
from megatron.data.tokenizers.build import build_tokenizer
from tests.fuzz.damage import damaged, in_time, written

BYTES = build_tokenizer("ByteLevelTokenizer")
ENCODER = Encoder(BYTES, EncodeOptions())
LIMITS = Limits(document_bytes=100_000)
TEXTS = ["one", "zwei ü", "three\nlines\n", "", "日本"]
LINES = "".join(json.dumps({"text": text, "meta": {"n": 5}}) + "\n" for text in TEXTS).encode()
MORE = b'"bare"\n\n{"text": ["a", "b"]}\n'
Reference = Callable[[bytes], list[str]]


def prepared(name: str, content: bytes) -> tuple[list[str], list[str]]:
    """The documents and the faults that data preparation finds in a file."""
    documents: list[str] = []
    faults: list[str] = []
    path = written(name, content)
    try:
        [source] = find_sources([path])
        for chunk in read_source(source, ("text",), {}, LIMITS):
            encoded = ENCODER(chunk)
            faults += encoded.faults
            at = 0
            for size in encoded.sizes[0]:
                documents.append(bytes(encoded.tokens[0][at : at + size - 1].tolist()).decode())
                at += size
    except (Fault, CorpusError) as error:
        faults.append(str(error))
    assert all(str(path) in fault for fault in faults), faults
    return documents, faults


def of_lines(content: bytes) -> list[str]:
    found = []
    for line in content.split(b"\n"):
        if line.strip():
            record = json.loads(line.decode("utf-8-sig"))
            text = record if isinstance(record, str) else record["text"]
            found.append("\n\n".join(text) if isinstance(text, list) else text)
    return [text for text in found if text]


def of_members(members: list[tuple[str, bytes]]) -> list[str]:
    found = []
    for name, content in members:
        if name.lower().endswith((".jsonl", ".json", ".ndjson")):
            found += of_lines(content)
        elif name.lower().endswith(".jsonl.gz"):
            found += of_lines(gzip.decompress(content))
        else:
            found.append(content.decode("utf-8-sig"))
    return [text for text in found if text]


def of_tar(content: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        files = [member for member in archive if member.isfile()]
        return of_members([(file.name, archive.extractfile(file).read()) for file in files])


def of_zip(content: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = [entry for entry in archive.infolist() if not entry.is_dir()]
        return of_members([(file.filename, archive.read(file)) for file in files])


def of_dat(content: bytes) -> list[str]:
    found = []
    while content:
        size = int(content[:16])
        found.append(content[16 : 16 + size].decode("utf-8-sig"))
        content = content[16 + size :]
    return [text for text in found if text]


def of_zst(content: bytes) -> list[str]:
    reader = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True)
    return of_lines(reader.read())


def of_parquet(content: bytes) -> list[str]:
    table = pyarrow.parquet.read_table(pyarrow.BufferReader(content), columns=["text"])
    column = table["text"].to_pylist()
    return [text if isinstance(text, str) else text.decode() for text in column if text]


def in_tar(**options: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **options) as archive:
        for name, content in (("a.txt", b"text"), ("ü.jsonl", LINES), ("c.tex", b"x" * 600)):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(content), {"comment": "x"}
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def in_zip(kind: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, content in (("a.txt", b"text"), ("folder/", b""), ("folder/ü.jsonl", LINES)):
            archive.writestr(name, content)
    return file.getvalue()


def in_parquet(kind: pyarrow.DataType, **options: object) -> bytes:
    file = io.BytesIO()
    column = pyarrow.array(TEXTS, pyarrow.string()).cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"text": column, "n": range(5)}), file, **options)
    return file.getvalue()


KINDS: dict[str, tuple[list[bytes], Reference]] = {
    "a.jsonl": ([LINES, MORE, LINES + MORE], of_lines),
    "a.txt": ([b"text\n", "\ufeffü".encode()], lambda content: of_members([("", content)])),
    "a.jsonl.gz": (
        [gzip.compress(LINES), gzip.compress(LINES) + gzip.compress(MORE)],
        lambda content: of_lines(gzip.decompress(content)),
    ),
    "a.jsonl.xz": ([lzma.compress(LINES)], lambda content: of_lines(lzma.decompress(content))),
    "a.jsonl.bz2": ([bz2.compress(LINES)], lambda content: of_lines(bz2.decompress(content))),
    "a.jsonl.zst": (
        [zstandard.compress(LINES), zstandard.compress(LINES) + zstandard.compress(MORE)],
        of_zst,
    ),
    "a.dat": ([b"%016d" % 4 + b"text" + b"%016d" % 3 + "ü!".encode()], of_dat),
    "a.tar": ([in_tar(format=tarfile.GNU_FORMAT), in_tar(format=tarfile.PAX_FORMAT)], of_tar),
    "a.zip": ([in_zip(zipfile.ZIP_STORED), in_zip(zipfile.ZIP_DEFLATED)], of_zip),
    "a.parquet": (
        [
            in_parquet(pyarrow.string()),
            in_parquet(pyarrow.binary(), compression="zstd"),
            in_parquet(pyarrow.large_string(), use_dictionary=False, data_page_version="2.0"),
        ],
        of_parquet,
    ),
}


def check(name: str, content: bytes) -> None:
    with in_time():
        documents, faults = prepared(name, content)
        if not content and name != "a.txt":
            assert faults
        elif not faults:
            assert documents == KINDS[name][1](content)


@pytest.mark.parametrize("name", KINDS)
def test_whole_files_are_read(name: str) -> None:
    """So that the fuzzers below start from something."""
    for content in KINDS[name][0]:
        documents, faults = prepared(name, content)
        assert documents == KINDS[name][1](content) and not faults and len(documents) > 0


@given(damaged(KINDS["a.jsonl"][0]))
@example(b"{}")
@example(b'{"text": ' + b"[" * 3000 + b"]" * 3000 + b"}")
@example(b'{"text": "a", "n": ' + b"1" * 5000 + b"}")
def test_records(content: bytes) -> None:
    check("a.jsonl", content)


@given(damaged(KINDS["a.txt"][0]))
def test_text(content: bytes) -> None:
    check("a.txt", content)


@given(damaged(KINDS["a.jsonl.gz"][0]))
def test_gzip(content: bytes) -> None:
    check("a.jsonl.gz", content)


@given(damaged(KINDS["a.jsonl.xz"][0]))
def test_xz(content: bytes) -> None:
    check("a.jsonl.xz", content)


@given(damaged(KINDS["a.jsonl.bz2"][0]))
def test_bzip2(content: bytes) -> None:
    check("a.jsonl.bz2", content)


@given(damaged(KINDS["a.jsonl.zst"][0]))
def test_zstandard(content: bytes) -> None:
    check("a.jsonl.zst", content)


@given(damaged(KINDS["a.dat"][0]))
@example(b"9" * 16)
@example(b"%016d" % 10**15 + b"x")
def test_dat(content: bytes) -> None:
    check("a.dat", content)


@given(damaged(KINDS["a.tar"][0]))
def test_tar(content: bytes) -> None:
    check("a.tar", content)


@given(damaged(KINDS["a.zip"][0]))
def test_zip(content: bytes) -> None:
    check("a.zip", content)


@given(damaged(KINDS["a.parquet"][0]))
def test_parquet(content: bytes) -> None:
    check("a.parquet", content)
