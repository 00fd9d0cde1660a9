"""Test tools/inspect_shards.py on good and on damaged token shards."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import prepare_data
from tests.helpers.shards import write_documents
from tools import inspect_shards


@pytest.fixture
def prefix(tmp_path, capsys) -> Path:
    texts = [f"document {i} " + "é" * (i * 7 % 500) for i in range(100)] + [""]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert prepare_data.main(["--input", str(path), "--name", "a", "-d", str(tmp_path)]) == 0
    capsys.readouterr()
    return tmp_path / "a_text_document"


def test_good_shards(prefix, capsys):
    assert inspect_shards.main([str(prefix), "-n", "2", "--characters", "12"]) == 0
    out = capsys.readouterr().out
    for text in (
        "100 documents, ", "dtype: uint16", "tokens a document: shortest 12, ",
        "empty documents: 1",
        "tokenizer: ByteLevelTokenizer", "bytes a token", "skipped 0",
        "--- document 0, 12 tokens\ndocument 0 <...", "--- document 1, ", "the files are whole",
    ):  # fmt: skip
        assert text in out
    assert "--- document 2" not in out


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: Path(f"{p}.bin").write_bytes(b"12"), "truncated"),
        (lambda p: Path(f"{p}.idx").unlink(), "no such file"),
        (lambda p: poke(p, 60000), "token 60000 near token 0 is outside the vocabulary of 257"),
        (lambda p: recount(p), "counts 7 documents, the shards hold 100"),
    ],
)
def test_what_is_wrong(prefix, capsys, change, message):
    change(prefix)
    assert inspect_shards.main([str(prefix)]) == 1
    assert message in capsys.readouterr().err


def poke(prefix: Path, token: int) -> None:
    path = Path(f"{prefix}.bin")
    tokens = np.frombuffer(path.read_bytes(), np.uint16).copy()
    tokens[5] = token
    path.write_bytes(tokens.tobytes())


def recount(prefix: Path) -> None:
    path = Path(f"{prefix}.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"documents": 7}))


def test_another_tokenizer_and_none(prefix, tmp_path, capsys):
    assert inspect_shards.main([str(prefix), "-t", "CharLevelTokenizer"]) == 1
    assert "was made with ByteLevelTokenizer" in capsys.readouterr().err
    write_documents(tmp_path / "foreign", [range(5)])
    assert inspect_shards.main([str(tmp_path / "foreign")]) == 0
    out = capsys.readouterr().out
    assert "manifest: none" in out and "give the tokenizer" in out
