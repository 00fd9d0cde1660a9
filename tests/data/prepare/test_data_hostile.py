"""Hostile and damaged inputs: each is an error that names it, or is skipped and counted."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

import prepare_data
from megatron.data.shards.manifest import read_manifest
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.build import build_tokenizer
from tests.helpers import archives

GOOD = b'{"text": "fine"}\n'
ZEROS = bytes(1 << 20)
REPEATED = (b'"' + b"x" * 100_000 + b'"\n') * 100
BYTES = build_tokenizer("ByteLevelTokenizer")


def lines(*records: bytes) -> bytes:
    return GOOD + b"".join(record + b"\n" for record in records) + GOOD


def nested(depth: int) -> bytes:
    return b'{"text": "a", "meta": ' + b"[" * depth + b"]" * depth + b"}"


def zip_of(name: str, content: bytes, change: Callable[[bytes], bytes] = bytes) -> bytes:
    """A zip of one member, with `change` applied to its bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, content)
    return change(file.getvalue())


def flags(value: int) -> Callable[[bytes], bytes]:
    """Set the general-purpose flags in both headers of a zip's only member."""

    def change(content: bytes) -> bytes:
        whole = bytearray(content)
        for magic, at in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
            struct.pack_into("<H", whole, whole.index(magic) + at, value)
        return bytes(whole)

    return change


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new)


def tar_of(*headers: bytes) -> bytes:
    return b"".join(headers) + bytes(1024)


def header(name: str, size: bytes = b"0" * 11 + b" ", kind: bytes = b"0", more=()) -> bytes:
    """A tar header with the given bytes, and its right checksum."""
    info = tarfile.TarInfo(name)
    whole = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    whole[124:136], whole[156:157] = size, kind
    for at, content in more:
        whole[at : at + len(content)] = content
    whole[148:156] = b" " * 8
    whole[148:156] = b"%06o\0 " % sum(whole)
    return bytes(whole)


# A sparse file of 64 GiB in 512 bytes: its map says that one byte lies at the end.
SPARSE = header(
    "a.txt", b"0" * 11 + b" ", b"S", [(386, b"%011o\0%011o\0" % (1, 0)), (483, b"%011o\0" % 8**10)]
)

PASSWORDS = [(157, b"/etc/passwd")]
OFFSET = b"\xff\xff\xff\x7f\0\0"


def table(path: Path, **columns: pyarrow.Array) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def parquet(kind: pyarrow.DataType, *values: object) -> Callable[[Path], None]:
    return lambda path: table(path, text=pyarrow.array(values, kind))


def two_columns(path: Path) -> None:
    column = pyarrow.array(["a"])
    pyarrow.parquet.write_table(pyarrow.table([column, column], names=["text", "text"]), path)


def footer(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        table(path, text=pyarrow.array(["a"]), other=pyarrow.array(["b"]))
        path.write_bytes(change(path.read_bytes()))

    return write


def repeated_text(path: Path) -> None:
    table(path, text=pyarrow.array(["x" * 50_000] * 2000))


STRUCT = pyarrow.struct([("a", pyarrow.string())])
DAMAGED = r": is truncated or damaged: "
BOMB = r".*: expands to more than 200 times the [\d,]+ bytes of the input; .* --max-expansion"
LARGE = r".*: one text has more than 1,000,000 bytes; split it, or give .* --max-document-bytes"
TYPE = r":1: column 'text' is of type {}, not a string"

HOSTILE: list[tuple[str, bytes | Callable[[Path], None], str]] = [
    # records
    ("digits.jsonl", lines(b'{"text": "a", "n": ' + b"7" * 4301 + b"}"), ":2: .*4300 digits"),
    ("deep.jsonl", lines(nested(3000)), ":2: is nested too deeply"),
    ("deeper.jsonl", lines(nested(200_000)), ":2: is nested too deeply"),
    ("half.jsonl", lines(b'{"text": "\\ud800"}'), ":2: .*half of a surrogate pair"),
    ("latin.jsonl", lines(b'{"text": "caf\xe9"}'), r":2:?\d*: byte 0xe9 is not valid UTF-8"),
    ("number.jsonl", lines(b"1e999"), ":2: is not a JSON object"),
    ("long.jsonl", GOOD + b'"' + b"x" * 3_000_000 + b'"\n', ":2" + LARGE),
    ("long.txt", b"x" * 1_000_001, LARGE),
    ("utf16.txt", "text".encode("utf-16"), ":1: byte 0xff is not valid UTF-8"),
    # lm_dataformat's .dat
    ("huge.dat", b"9" * 16 + b"x", ":1" + LARGE),
    ("minus.dat", b"-000000000000001x", ":1" + DAMAGED + ".*is not the length"),
    ("short.dat", b"%016d" % 10 + b"x", ":1" + DAMAGED + "the document has 1 of 10 bytes"),
    ("head.dat", b"%016d" % 1 + b"x" + b"0" * 15, ":2" + DAMAGED + ".*is not the length"),
    # zip
    ("name.zip", zip_of("a\xe9.txt", b"x", replaced("é".encode(), b"\xff\xff")), DAMAGED),
    ("secret.zip", zip_of("a.txt", b"x", flags(1)), "!a.txt" + DAMAGED + ".*encrypted"),
    ("method.zip", zip_of("a.txt", b"x", replaced(b"\x08\0", b"\x63\0")), "!a.txt" + DAMAGED),
    ("offset.zip", zip_of("a.txt", b"x", lambda z: z[:-6] + OFFSET), "!a.txt" + DAMAGED),
    ("crc.zip", zip_of("a.txt", b"text", replaced(b"PK\1\2", b"PK\1\3")), DAMAGED),
    ("bomb.zip", zip_of("a.txt", ZEROS * 8), "!a.txt" + LARGE),
    ("bomb2.zip", zip_of("a.jsonl", REPEATED), "!a.jsonl" + BOMB),
    # compressed streams
    ("line.jsonl.gz", gzip.compress(ZEROS * 16), ":1" + LARGE),
    ("lines.jsonl.gz", gzip.compress(REPEATED), BOMB),
    ("a.jsonl.zst", zstandard.compress(REPEATED), BOMB),
    ("a.jsonl.xz", lzma.compress(REPEATED, preset=0), BOMB),
    ("a.jsonl.bz2", bz2.compress(REPEATED), BOMB),
    ("twice.tar.gz", gzip.compress(b""), DAMAGED),
    ("padding.tar.gz", gzip.compress(tar_of(header("a.txt")) + ZEROS * 16), BOMB),
    # tar
    ("sparse.tar", tar_of(SPARSE, bytes(512)), "!a.txt" + LARGE),
    ("size.tar", tar_of(header("a.txt", b"77777777777 ")), "!a.txt" + DAMAGED),
    ("minus.tar", tar_of(header("a.txt", b"\xff" * 11 + b"\0")), "!a.txt" + DAMAGED),
    ("link.tar", tar_of(header("a.txt", kind=b"2", more=PASSWORDS)), ": has no records"),
    ("hard.tar", tar_of(header("a.txt", kind=b"1", more=PASSWORDS)), ": has no records"),
    ("fifo.tar", tar_of(header("a.txt", kind=b"6")), ": has no records"),
    ("name.tar", tar_of(header("a\n\x1b[31m.txt", b"00000000001 "), b"\xff" + bytes(511)), r"!a\\n"
     r"\\x1b\[31m.txt:1: byte 0xff is not valid UTF-8"),
    ("pax.tar", tar_of(header("a", b"00000000005 ", b"x"), b"99 x\n" + bytes(507)), DAMAGED),
    # parquet
    ("bytes.parquet", parquet(pyarrow.binary(), b"fine", b"\xff", b"fine"), ":2: byte 0x"),
    ("int.parquet", parquet(pyarrow.int64(), 5), TYPE.format("int64")),
    ("time.parquet", parquet(pyarrow.timestamp("s"), 5), TYPE.format(r"timestamp\[ms\]")),
    ("struct.parquet", parquet(STRUCT, {"a": "b"}), TYPE.format("struct<a: string>")),
    ("ints.parquet", parquet(pyarrow.list_(pyarrow.int8()), [5]), TYPE.format("list<.*>")),
    ("null.parquet", parquet(pyarrow.string(), None), ":1: 'text' is of type NoneType"),
    ("two.parquet", two_columns, ":1: has 2 columns 'text'"),
    ("utf8.parquet", footer(replaced(b"other", b"\xff\xfe\xff\xfe\xff")), ":1" + DAMAGED),
    ("length.parquet", footer(lambda c: c[:-8] + b"\xff\xff\xff\x7fPAR1"), ":1" + DAMAGED),
    ("empty.parquet", footer(lambda c: b"PAR1PAR1"), ":1" + DAMAGED),
    ("text.parquet", repeated_text, BOMB),
    ("second.parquet", parquet(pyarrow.string(), "a", "x" * 1_000_000), ":2" + LARGE),
]  # fmt: skip


@pytest.fixture(autouse=True)
def little_is_always_allowed(monkeypatch):
    monkeypatch.setattr("megatron.data.prepare.chunks.ALWAYS_ALLOWED", 2 << 20)


@pytest.mark.parametrize("name, content, message", HOSTILE, ids=[name for name, *_ in HOSTILE])
def test_a_hostile_file_is_named_or_skipped(tmp_path, capsys, name, content, message):
    path, good, out = tmp_path / name, tmp_path / "z.txt", tmp_path / "out"
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    good.write_text("after")
    arguments = ["--input", path, good, "--name", "x", "-d", out, "--workers", 1]
    arguments += ["--max-document-bytes", 1_000_000]
    assert prepare_data.main(list(map(str, arguments))) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert re.search(rf"^error: {re.escape(str(path))}{message}", error, re.MULTILINE), error
    assert not list(out.glob("*.idx"))
    assert prepare_data.main([*map(str, arguments), "--on-error", "skip"]) == 0
    manifest, shards = read_manifest(out / "x_text_document"), ShardReader(out / "x_text_document")
    assert manifest["source"]["skipped"] >= 1
    assert BYTES.decode(shards.get(len(shards) - 1)) == "after<|endoftext|>"
    # No unfinished shard is left, and no file was written to another folder.
    assert {path.name for path in tmp_path.iterdir()} == {name, "z.txt", "out"}


def test_an_input_for_which_memory_is_short_is_not_skipped_as_damaged(
    tmp_path, capsys, monkeypatch
):
    def read(*_):
        raise MemoryError("realloc failed")

    monkeypatch.setattr("megatron.data.prepare.chunks.text_chunks", read)
    (tmp_path / "a.txt").write_text("a")
    arguments = ["--input", str(tmp_path / "a.txt"), "--name", "x", "-d", str(tmp_path)]
    assert prepare_data.main([*arguments, "--workers", "1", "--on-error", "skip"]) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path}/a.txt: reading it needs more memory than there is (realloc failed)" in error


def test_the_limits_are_flags(tmp_path, capsys):
    path = archives.gz(tmp_path / "a.jsonl.gz", REPEATED)
    arguments = ["--input", str(path), "--name", "x", "-d", str(tmp_path), "--workers", "1"]
    assert prepare_data.main([*arguments, "--max-expansion", "1000"]) == 0
    assert read_manifest(tmp_path / "x_text_document")["documents"] == 100
    for flag in ("--max-expansion", "--max-document-bytes"):
        with pytest.raises(SystemExit):
            prepare_data.main([*arguments, flag, "0"])
        assert f"{flag} 0" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [pyarrow.binary(), pyarrow.large_binary(), pyarrow.large_string()])
def test_text_in_other_columns_is_decoded(tmp_path, kind):
    texts = ["hé", "a\nb", "日本"]
    table(tmp_path / "a.parquet", text=pyarrow.array(texts, pyarrow.string()).cast(kind))
    words = pyarrow.array(texts).dictionary_encode()
    table(tmp_path / "b.parquet", text=words, meta=pyarrow.array([json.dumps("x")] * 3))
    arguments = ["--input", str(tmp_path / "*.parquet"), "--name", "x", "-d", str(tmp_path)]
    assert prepare_data.main([*arguments, "--workers", "1"]) == 0
    shards = ShardReader(tmp_path / "x_text_document")
    assert [BYTES.decode(shards.get(i)[:-1]) for i in range(6)] == texts * 2


def test_links_out_of_a_folder_are_refused(tmp_path, capsys):
    """Links to files and folders, and chains of them; links inside the folder are read."""
    folder, secret = tmp_path / "texts", tmp_path / "secret.txt"
    (folder / "sub").mkdir(parents=True)
    secret.write_text("secret")
    (folder / "a.txt").write_text("a")
    (folder / ".store").mkdir()
    (folder / ".store/b").write_text("b")
    (folder / "sub/b.txt").symlink_to("../.store/b")
    (folder / "0.txt").symlink_to("a.txt")  # left out: its target is read
    (folder / "gone.txt").symlink_to("nowhere.txt")
    flags = ["--name", "x", "-d", str(tmp_path), "--workers", "1", "--overwrite"]
    arguments = ["--input", str(folder), *flags]
    assert prepare_data.main(arguments) == 0
    assert read_manifest(tmp_path / "x_text_document")["documents"] == 2
    (folder / "c.txt").symlink_to("../secret.txt")
    (folder / "d.txt").symlink_to("c.txt")
    (folder / "up").symlink_to("..")
    (folder / "etc").symlink_to("/etc")
    (folder / "f.txt").symlink_to("/nowhere/f.txt")
    assert prepare_data.main(arguments) == 1
    error = capsys.readouterr().err
    for name, target in (("c.txt", secret), ("d.txt", secret), ("up", tmp_path), ("etc", "/etc")):
        assert f"{folder}/{name}: is a link out of the folder, to {target}; remove it" in error
    assert f"{folder}/f.txt: is a link out" in error and error.count("is a link") == 5
    # The links that a user names are read.
    assert prepare_data.main([*flags, "--input", f"{folder}/[ac].txt"]) == 0
    linked = tmp_path / "linked"
    linked.symlink_to(folder / "sub")
    assert prepare_data.main([*flags, "--input", str(linked)]) == 1
    assert f"{linked}/b.txt: is a link out of the folder" in capsys.readouterr().err


def test_pipes_and_devices_are_refused(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    os.mkfifo(folder / "a.txt")
    for given in (folder, folder / "a.txt", folder / "*.txt"):
        arguments = ["--input", str(given), "--name", "x", "-d", str(tmp_path), "--workers", "1"]
        assert prepare_data.main(arguments) == 1
        assert f"{folder}/a.txt: is a pipe, socket or device; write its" in capsys.readouterr().err
