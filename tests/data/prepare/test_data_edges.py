"""Test unusual inputs: empty archives, JSON arrays, folders of `datasets`, single partitions."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import tarfile
import zipfile
from pathlib import Path

import lm_dataformat
import pytest

from megatron.data.errors import CorpusError
from megatron.data.prepare.journal import Journal, State
from megatron.data.prepare.sources import find_sources
from megatron.data.prepare.text_to_shards import Preparation
from megatron.data.shards.manifest import read_manifest
from megatron.data.shards.merge import merge
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.byte_level import ByteLevelTokenizer
from tools.datasets import preprocess_data

GOOD = '{"text": "fine", "meta": {"pile_set_name": "ArXiv"}}\n'


def empty_archives(folder: Path) -> dict[str, Path]:
    made = {name: folder / f"empty{name}" for name in (".jsonl.gz", ".tar", ".zip", ".parquet")}
    made[".jsonl.gz"].write_bytes(gzip.compress(b""))
    tarfile.open(made[".tar"], "w").close()
    zipfile.ZipFile(made[".zip"], "w").close()
    import pyarrow
    import pyarrow.parquet

    no_rows = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(no_rows, made[".parquet"])
    return made


@pytest.mark.parametrize("kind", [".jsonl.gz", ".parquet"])
def test_the_last_file_of_a_writer_may_have_no_records(tmp_path, run, kind):
    empty, good = empty_archives(tmp_path)[kind], tmp_path / "good.jsonl"
    good.write_text(GOOD)
    run([good, empty])
    assert len(ShardReader(tmp_path / "out" / "x_text_document")) == 1
    assert "no document with text in it; nothing is written" in run([empty], code=1, name="y")


def test_an_archive_that_lm_dataformat_committed_twice(tmp_path, run):
    archive = lm_dataformat.Archive(str(tmp_path / "in"))
    archive.add_data("once")
    archive.commit()
    archive.commit()  # writes a file without records
    assert list(lm_dataformat.Reader(str(tmp_path / "in")).stream_data()) == ["once"]
    assert len(list((tmp_path / "in").glob("*.jsonl.zst"))) == 2
    run([tmp_path / "in"])
    assert len(ShardReader(tmp_path / "out" / "x_text_document")) == 1


@pytest.mark.parametrize("kind", [".tar", ".zip"])
def test_an_archive_without_records_is_an_error(tmp_path, run, kind):
    """This holds among good inputs, too, because an empty archive is probably a mistake."""
    empty, good = empty_archives(tmp_path)[kind], tmp_path / "good.jsonl"
    good.write_text(GOOD)
    assert f"error: {empty}: has no records" in run([good, empty], code=1)
    other = tmp_path / "other.jsonl"
    other.write_text(GOOD)
    text = run([good, empty, other], "--on-error", "skip")
    assert "skipped 1 faulty records" in text and f"{empty}: has no records" in text
    assert len(ShardReader(tmp_path / "out" / "x_text_document")) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps([{"text": "a"}]), ":1: is a JSON array; write one JSON object a line, e.g."),
        (json.dumps([{"text": "a"}], indent=1), ":1: is not JSON: Expecting value at column 2; wr"),
        (GOOD + '{"text": 5}\n', ":2: 'text' is of type int, not a string"),
    ],
)
def test_json_that_is_no_record(tmp_path, run, content, message):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert f"error: {path}{message}" in run([path], code=1)


def test_why_nothing_was_written(tmp_path, run):
    path = tmp_path / "a.jsonl"
    path.write_text(GOOD * 3)
    text = run([path], "--pile-set", "arxiv", code=1)
    assert "no document with text in it (3 left out by --pile-set); nothing is written" in text
    assert not list((tmp_path / "out").iterdir())


def test_folders_of_the_datasets_library(tmp_path, run):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(600)]})
    rows = rows.add_column("digest", [bytes([237, 255])] * 600)  # is not UTF-8, and is not read
    rows.save_to_disk(tmp_path / "rows")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "splits")
    run([tmp_path / "rows"])
    assert len(ShardReader(tmp_path / "out" / "x_text_document")) == 600
    text = run([tmp_path / "splits"], code=1, name="y")
    assert "holds several splits; give one of ['train']'s folder" in text
    text = run([f"hub:{tmp_path / 'rows'}"], code=1, name="y")
    assert f"error: hub:{tmp_path / 'rows'}: cannot be opened: " in text
    [source] = find_sources([tmp_path / "rows"])
    before = source.identity()
    [arrow] = (tmp_path / "rows").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:-2000])
    assert source.identity() != before  # an interrupted run would start over
    assert f"error: {tmp_path / 'rows'}" in run([tmp_path / "rows"], code=1, name="y")


def full_disk(_: Path) -> None:
    raise OSError(28, "No space left on device")


def test_a_journal_that_is_removed_leaves_nothing(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "x", {}, 0)
    first, second = (State({"documents": n}, [], []) for n in (1, 2))
    journal.write(first)
    monkeypatch.setattr("megatron.files.flush", full_disk)
    with pytest.raises(OSError, match="No space left"):
        journal.write(second)
    assert journal.read() == first
    journal.remove()
    assert not list(tmp_path.iterdir())


def test_a_key_named_twice(tmp_path, capsys):
    flags = ["--input", "a.jsonl", "--output-prefix", str(tmp_path / "x")]
    with pytest.raises(SystemExit):
        preprocess_data.main(
            [*flags, "--tokenizer-type", "CharLevelTokenizer", "--jsonl-keys", "text", "text"]
        )
    assert "--jsonl-keys text text: a key is given twice" in capsys.readouterr().err


def test_a_file_that_vanishes_is_skipped_alone(tmp_path, monkeypatch):
    paths = [tmp_path / "in" / f"{number}.txt" for number in range(9)]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_text(path.name)
    sources = find_sources([str(tmp_path / "in")])
    paths[4].unlink()
    prefix = str(tmp_path / "x")
    [manifest] = Preparation(sources, [prefix], ByteLevelTokenizer(), on_error="skip").run()
    assert (manifest["documents"], manifest["source"]["skipped"]) == (8, 1)
    (fault,) = Path(f"{prefix}.skipped.txt").read_text().splitlines()
    assert fault.startswith(f"{paths[4]}: ")


def test_merged_shards_say_that_one_has_no_ends_of_documents(tmp_path, run):
    (tmp_path / "a.jsonl").write_text(GOOD)
    run([tmp_path / "a.jsonl"], name="a")
    run([tmp_path / "a.jsonl"], "--no-append-eod", name="b")
    for order in ("ab", "ba", "aa"):
        prefixes = [str(tmp_path / "out" / f"{name}_text_document") for name in order]
        merge(prefixes, tmp_path / order)
        assert read_manifest(str(tmp_path / order))["append_eod"] is (order == "aa")


@pytest.mark.parametrize(
    "inputs", [("a.txt", "*.txt"), ("r.jsonl", "."), ("x", "r.jsonl", "x/.."), ("x/c.txt", "link")]
)
def test_a_file_that_two_inputs_name_is_an_error(tmp_path, monkeypatch, inputs):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    for name in ("a.txt", "b.txt", "x/c.txt"):
        (tmp_path / name).write_text("text")
    (tmp_path / "r.jsonl").write_text('{"text": "record"}')
    (tmp_path / "link").symlink_to("x") if "link" in inputs else None
    file = tmp_path / inputs[-2]
    with pytest.raises(CorpusError, match=f"{file}: is named twice, which doubles its doc"):
        find_sources(inputs)
    assert find_sources(inputs[:1]) and find_sources(inputs[-1:])


def test_a_flag_that_is_given_twice_adds_its_values(tmp_path, run):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_text(GOOD)
    files = [tmp_path / f"{name}.jsonl" for name in ("a", "b", "c")]
    run([files[0]], "--input", files[1], files[2], "--pile-set", "ArXiv", "--pile-set", "X")
    assert len(ShardReader(tmp_path / "out" / "x_text_document")) == 3
    flags = ["--tokenizer-type", "ByteLevelTokenizer", "--output-prefix", tmp_path / "out" / "y"]
    given = ["--input", f"{files[0]},{files[1]}", "--input", files[2], *flags]
    assert preprocess_data.main([*map(str, given)]) == 0
    assert len(ShardReader(tmp_path / "out" / "y_text_document")) == 3


def test_what_macos_adds_to_an_archive_is_left_out(tmp_path, run):
    binary = b"\0\5\26\7\xff\xfe"
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.jsonl", GOOD)
        archive.writestr("__MACOSX/._a.jsonl", binary)
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        for name, content in (("./b.jsonl", GOOD.encode()), ("./._b.jsonl", binary)):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    run([tmp_path / "a.zip", tmp_path / "b.tar"])
    assert len(ShardReader(tmp_path / "out" / "x_text_document")) == 2


def test_compressed_texts_in_an_archive_and_archives_without_their_suffix(tmp_path, run):
    """OpenWebText's folder has tar archives whose names end in .xz alone."""
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "t.tar", "w") as archive:
        entry = tarfile.TarInfo("d/a.txt.gz")
        entry.size = len(content := gzip.compress(b"compressed"))
        archive.addfile(entry, io.BytesIO(content))
    run([tmp_path / "t.tar"])
    assert len(ShardReader(tmp_path / "out" / "x_text_document").get(0)) == len("compressed") + 1
    xz = tmp_path / "in" / "subset_data.xz"
    xz.write_bytes(lzma.compress((tmp_path / "t.tar").read_bytes()))
    text = run([tmp_path / "in"], code=1, name="y")
    assert f"{xz}: is a tar archive; name it .tar, .tar.xz, ..., or unpack it" in text


def test_a_configuration_of_a_data_set(tmp_path, run):
    for name in ("A", "B"):
        (tmp_path / "set" / name).mkdir(parents=True)
        (tmp_path / "set" / name / "train.jsonl").write_text(json.dumps({"text": name * 3}))
    card = "".join(
        f"- config_name: {name}\n  data_files: {name}/train.jsonl\n" for name in ("A", "B")
    )
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    assert "Config name is missing" in run([f"hub:{tmp_path / 'set'}"], code=1)
    run([f"hub:{tmp_path / 'set'}:train:B"])
    assert bytes(ShardReader(tmp_path / "out" / "x_text_document").get(0)[:3].tolist()) == b"BBB"


def test_a_column_of_string_views(tmp_path, run):
    import pyarrow
    import pyarrow.parquet

    rows = pyarrow.table({"text": pyarrow.array(["one", "two"], pyarrow.string_view())})
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet")
    run([tmp_path / "a.parquet"])
    assert len(ShardReader(tmp_path / "out" / "x_text_document")) == 2
