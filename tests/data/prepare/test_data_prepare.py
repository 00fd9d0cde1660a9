"""Test data preparation: the same files as the published command, a message for each fault."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

import prepare_data
from megatron.data.errors import CorpusError, ShardError
from megatron.data.prepare.sources import find_sources
from megatron.data.prepare.text_to_shards import Preparation
from megatron.data.shards.joined import join, open_each
from megatron.data.shards.manifest import read_manifest
from megatron.data.shards.reader import ShardReader
from megatron.data.tokenizers.build import build_tokenizer

BYTES = build_tokenizer("ByteLevelTokenizer")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return run(*arguments) -> (exit code, stdout, stderr) of prepare_data.py."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str):
        try:
            status = prepare_data.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status = stop.code
        return (status, *capsys.readouterr())

    return call


def test_the_published_files_from_their_text(run, parity, gpt2_files, tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(
        gzip.decompress((parity / "corpus.jsonl.gz").read_bytes())
    )
    vocabulary, merges = gpt2_files
    status, out, err = run(
        *("-d", "out", "-t", "GPT2BPETokenizer", "-v", vocabulary, "-m", merges),
        *("--input", "corpus.jsonl", "--name", "corpus"),
    )
    assert status == 0, err
    assert "data_path: out/corpus_text_document\n205 documents, 171,137 tokens" in out
    assert "tokenising corpus |██████████|" in err and "B/s" in err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"corpus_text_document{suffix}" for suffix in (".bin", ".idx", ".json")
    ]
    for suffix in (".bin", ".idx"):
        name = f"corpus_text_document{suffix}"
        assert (tmp_path / "out" / name).read_bytes() == (parity / name).read_bytes()
    manifest = read_manifest(tmp_path / "out/corpus_text_document")
    counted = {key: manifest[key] for key in ("documents", "empty_documents", "tokens")}
    assert counted == {"documents": 205, "empty_documents": 5, "tokens": 171137}
    assert (manifest["tokenizer"], manifest["vocab_size"]) == ("GPT2BPETokenizer", 50257)


def test_several_files_and_options(run, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(
        b'\xef\xbb\xbf{"body": "one"}\n\n{"body": ""}\n{"body": "2"}'
    )
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfth\nree")
    common = ("--input", "a.jsonl", "b.txt", "--name", "x", "--text-key", "body")
    assert run(*common)[0] == 0
    shards = ShardReader("data/x_text_document")
    assert [BYTES.decode(shards.get(i)) for i in range(3)] == [
        "one<|endoftext|>",
        "2<|endoftext|>",
        "th\nree<|endoftext|>",
    ]
    status, _, err = run(*common)
    assert status == 1 and "x_text_document.idx: exists already" in err and "--overwrite" in err
    assert run(*common, "--overwrite", "--no-append-eod")[0] == 0
    assert (
        ShardReader("data/x_text_document").tokens.tobytes()
        == BYTES.encode("one2th\nree").tobytes()
    )


FILES = {
    "good.jsonl": b'{"text": "fine"}\n',
    "bad.jsonl": b'{"text": "fine"}\n{"text": "cut\n',
    "list.jsonl": b'["text"]\n',
    "nokey.jsonl": b'{"text": "a"}\n{"body": "b", "meta": 1}\n',
    "number.jsonl": b'{"text": 5}\n',
    "latin.jsonl": b'{"text": "a"}\n\n{"text": "caf\xe9"}\n',
    "deep.jsonl": b"[" * 100_000 + b"\n",
    "half.jsonl": b'{"text": "fine"}\n{"text": "a\\ud800"}\n',
    "blank.jsonl": b"\n\n",
    "void.jsonl": b'{"text": ""}\n',
    "latin.txt": b"one\ntwo\ncaf\xe9\n",
    "empty.txt": b"",
    "x.csv": b"a,b\n",
}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ("bad.jsonl",),
            "error: bad.jsonl:2: is not JSON: Unterminated string starting at column 10",
        ),
        (("deep.jsonl",), "deep.jsonl:1: is nested too deeply"),
        (("list.jsonl",), "list.jsonl:1: is a JSON array; write one JSON object a line"),
        (("nokey.jsonl",), "nokey.jsonl:2: has no key 'text' (its keys: 'body', 'meta')"),
        (("number.jsonl",), "number.jsonl:1: 'text' is of type int, not a string"),
        (("latin.jsonl",), "latin.jsonl:3: byte 0xe9 is not valid UTF-8"),
        (("latin.txt",), "latin.txt:3: byte 0xe9 is not valid UTF-8"),
        (("half.jsonl",), r"half.jsonl:2: character 1 is '\ud800', half of a surrogate pair"),
        (("good.jsonl", "bad.jsonl"), "error: bad.jsonl:2: is not JSON"),
        (("blank.jsonl",), "error: blank.jsonl: no document with text in it; nothing is written"),
        (
            ("void.jsonl",),
            "error: void.jsonl: no document with text in it (1 without text); nothing is written",
        ),
        (
            ("empty.txt",),
            "error: empty.txt: no document with text in it (1 without text); nothing is written",
        ),
        (("none.txt",), "error: none.txt: no such file"),
        (("folder",), "error: folder: a folder without files"),
        (("x.csv",), "error: x.csv: unknown kind '.csv'; give .jsonl, .txt or .parquet files"),
        (("none.txt", "x.csv"), "none.txt: no such file\nx.csv: unknown kind"),
    ],
)
def test_faulty_input(run, tmp_path, arguments, message):
    (tmp_path / "folder").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    status, out, err = run("--input", *arguments, "--name", "x", "-d", "out")
    assert status == 1 and out == ""
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (
            ("builtin:python-stdlb",),
            1,
            "unknown corpus builtin:python-stdlb; did you mean builtin:",
        ),
        (("python-stdlb",), 1, "did you mean builtin:python-stdlib? known: "),
        (
            ("openwebtxt2",),
            1,
            "did you mean openwebtext2? known: builtin:python-stdlib, openwebtext2, github, arxiv",
        ),
        (("builtin:python-stdlib", "-t", "ByteTokenizer"), 1, "did you mean ByteLevelTokenizer?"),
        (("builtin:python-stdlib", "-d", "file"), 2, "-d file: is a file, not a folder"),
        ((), 2, "give either a corpus (builtin:python-stdlib, openwebtext2, ...) or --input F"),
        (("builtin:python-stdlib", "--input", "a.txt"), 2, "does not go with it"),
        (("--input", "a.txt"), 2, "--input needs --name NAME"),
        (("--input", "a.txt", "--name", "b/c"), 2, "--name b/c: is a name, not a path"),
        (("builtin:python-stdlib", "--name", "x"), 2, "does not go with it"),
        (("--input", "a.txt", "--name", "x", "--partition", "3/2"), 2, "write I/N with 1 <= I"),
        (("file",), 2, "file: files are given by --input FILES --name NAME"),
        (("--input", "file.txt", "--name", "x", "-d", "file/x"), 1, "would lie in one; name a f"),
        (("builtin:python-stdlib", "--no-append-eod"), 2, "--no-append-eod does not go with it"),
        (("--input", "a.txt", "--name", "x", "-v", "v.json"), 2, "v.json: which tokenizer is it"),
        (
            ("openwebtext2", "--mirror", "localhost"),
            2,
            "--mirror localhost: is not an address; write",
        ),
    ],
)
def test_wrong_commands(run, tmp_path, arguments, status, message):
    (tmp_path / "file").touch()
    (tmp_path / "file.txt").write_text("text")
    found, _, err = run(*arguments)
    assert found == status and message in err and "Traceback" not in err


def written(folder, texts, name="x", **options):
    """Write shards of `texts` in `folder`; return the manifest."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    [manifest] = Preparation(find_sources([path]), [folder / name], BYTES, **options).run()
    return manifest


def test_a_failing_source_keeps_the_earlier_data(tmp_path):
    written(tmp_path, ["one"])
    before = {f"x{suffix}": (tmp_path / f"x{suffix}").read_bytes() for suffix in (".bin", ".idx")}
    (tmp_path / "x.jsonl").write_text('{"text": "two"}\n{"text": 3}\n')
    with pytest.raises(CorpusError, match="x.jsonl:2: 'text' is of type int"):
        Preparation(find_sources([tmp_path / "x.jsonl"]), [tmp_path / "x"], BYTES).run()
    names = ["x.bin", "x.idx", "x.json", "x.jsonl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_many_chunks_are_in_order(tmp_path):
    texts = [f"{i} " * (i % 977) for i in range(4000)]
    manifest = written(tmp_path, texts)
    kept = [text for text in texts if text]
    assert manifest["text_bytes"] == sum(map(len, kept)) and manifest["documents"] == len(kept)
    assert manifest["empty_documents"] == len(texts) - len(kept)
    expected = np.concatenate([[*text.encode(), 256] for text in kept])
    np.testing.assert_array_equal(ShardReader(tmp_path / "x").tokens, expected)


def test_shards_of_another_tokenizer_are_refused(tmp_path, published_shards):
    prefix = tmp_path / "x"
    written(tmp_path, ["text"])
    other = build_tokenizer("CharLevelTokenizer")
    join(open_each(prefix, BYTES))
    join(open_each(prefix))
    with pytest.raises(ShardError, match="made with ByteLevelTokenizer .* not with .* CharLevel"):
        join(open_each(prefix, other))
    join(open_each(published_shards.prefix, other))  # no manifest: nothing to compare
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ShardError, match=r"x\.json: is not a manifest"):
        join(open_each(prefix, other))


def test_a_changed_input_is_read_again_and_a_skipping_run_goes_on(tmp_path):
    """A stopped run keeps its journal, which is used only if the inputs are the same."""
    path, options = tmp_path / "x.jsonl", {"checkpoint_seconds": 0.0}
    good = [f"{i} " * 400 for i in range(3000)]  # several chunks
    lines = [json.dumps({"text": text}) + "\n" for text in good]
    path.write_text("".join(lines) + '{"text": 1}\n')
    sources = find_sources([path])
    stop, skip = ({"on_error": how, **options} for how in ("stop", "skip"))
    with pytest.raises(CorpusError, match="x.jsonl:3001: .* goes on after the first 2,"):
        Preparation(sources, [tmp_path / "x"], BYTES, **stop).run()
    kept = {path.name for path in tmp_path.iterdir()}
    assert {"x.journal", "x.bin.part", "x.idx.part"} <= kept and "x.idx" not in kept
    [manifest] = Preparation(sources, [tmp_path / "x"], BYTES, **skip).run()
    assert (manifest["documents"], manifest["source"]["skipped"]) == (3000, 1)
    expected = (tmp_path / "x.bin").read_bytes()
    with pytest.raises(CorpusError, match="x.jsonl:3001"):
        Preparation(sources, [tmp_path / "y"], BYTES, **stop).run()
    path.write_text("".join(lines[1:]))  # corrected, and changed at its beginning
    [manifest] = Preparation(find_sources([path]), [tmp_path / "y"], BYTES, **stop).run()
    assert manifest["documents"] == 2999
    assert (tmp_path / "y.bin").read_bytes() == expected[len(good[0]) * 2 + 2 :]
    assert sorted(path.name for path in tmp_path.glob("y*")) == ["y.bin", "y.idx", "y.json"]
