"""Damaged and hostile tokenizer files: each is an error that names the file, never other ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.errors import TokenizerError
from megatron.data.tokenizers.build import build_tokenizer

Change = Callable[[dict], object]


def entry(token: str, i: object) -> Change:
    return lambda vocabulary: vocabulary | {token: i}


VOCABULARIES: list[tuple[str, Change | bytes, str]] = [
    ("two tokens of an id", entry("<|endoftext|>", 7), r"the id 7 of the token .* of '\(' too"),
    ("a negative id", entry("x x", -1), "the id -1 of the token 'x x' is not one of 0 to 1073"),
    ("a huge id", entry("x x", 2**32 + 5), "the id 4294967301 of the token 'x x' is not one of 0"),
    ("a fraction", entry("x x", 5.5), "not an object of tokens and ids"),
    ("a boolean", entry("x x", True), "not an object of tokens and ids"),
    ("nested", entry("x x", [[5]]), "not an object of tokens and ids"),
    ("a token named twice", b'{"a": 0, "b": 1, "a": 2}', "the token 'a' is named twice"),
    ("nested deeply", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
    ("nested very deeply", b"[" * 500_000, "recursion"),
    ("thousands of digits", b'{"a": ' + b"1" * 4301 + b"}", "4300 digits"),
    ("another encoding", '{"a": 0}'.encode("utf-16"), "can't decode byte"),
    ("nothing", b"", "Expecting value"),
    ("no symbols", b"{}", "lacks the byte symbols"),
]


@pytest.mark.parametrize("_, change, message", VOCABULARIES, ids=[case[0] for case in VOCABULARIES])
def test_a_vocabulary(gpt2_files, tmp_path, _, change, message):
    path = tmp_path / "vocab.json"
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        vocabulary = json.loads(gpt2_files[0].read_text(encoding="utf-8"))
        path.write_text(json.dumps(change(vocabulary)))
    with pytest.raises(TokenizerError, match=f"^{path}: .*{message}"):
        build_tokenizer("GPT2BPETokenizer", path, gpt2_files[1])


MERGES = [
    ("a merge twice", lambda text: text + "Ġ t\n", r":50002: 'Ġ t' is the merge of line 2"),
    ("no version", lambda text: text.partition("\n")[2], ":1: is a merge, not the version"),
    ("three tokens", lambda text: text + "a b c\n", ":50002: 'a b c' is not a merge of two"),
    ("another result", lambda text: text + "zq zq\n", ":50002: 'zq zq' is not a merge of two"),
    ("other bytes", lambda text: text.encode("utf-16"), ": is not GPT-2's merges.txt: .*decode"),
]


@pytest.mark.parametrize("_, change, message", MERGES, ids=[case[0] for case in MERGES])
def test_merges(gpt2_files, tmp_path, _, change, message):
    path = tmp_path / "merges.txt"
    made = change(gpt2_files[1].read_text(encoding="utf-8"))
    path.write_bytes(made if isinstance(made, bytes) else made.encode())
    with pytest.raises(TokenizerError, match=f"^{path}{message}"):
        build_tokenizer("GPT2BPETokenizer", gpt2_files[0], path)


def hf_file(path: Path, **changes: object) -> Path:
    """A small tokenizer.json with `changes`."""
    added = {"content": "<|endoftext|>", "id": 2, "special": True, "single_word": False}
    added |= {"lstrip": False, "rstrip": False, "normalized": False}
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    whole = {"version": "1.0", "added_tokens": [added], "model": model}
    whole |= {"pre_tokenizer": {"type": "Whitespace"}}
    path.write_text(json.dumps(whole | changes))
    return path


def test_a_tokenizer_json_never_cuts_or_pads_documents(tmp_path):
    short = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    padded = {"strategy": {"Fixed": 5}, "direction": "Right", "pad_to_multiple_of": None}
    padded |= {"pad_id": 1, "pad_type_id": 0, "pad_token": "b"}
    path = hf_file(tmp_path / "tokenizer.json", truncation=short, padding=padded)
    tokenizer = build_tokenizer("HFTokenizer", path)
    assert tokenizer.encode("a b a b a").tolist() == [0, 1, 0, 1, 0]
    assert tokenizer.encode("b").tolist() == [1]


def test_bpe_dropout_does_not_encode_at_random(tmp_path):
    """Dropout of merges is for training a model on varied text, not for a shard or a prompt."""
    vocabulary = {"a": 0, "b": 1, "aa": 2, "ab": 3}
    model = {"type": "BPE", "vocab": vocabulary, "merges": ["a a", "a b"], "dropout": 0.9}
    path = hf_file(tmp_path / "tokenizer.json", model=model)
    tokenizer = build_tokenizer("HFTokenizer", path)
    for _ in range(20):
        assert tokenizer.encode("aaab").tolist() == [2, 3]


def test_a_text_that_a_tokenizer_json_cannot_encode_is_named_without_a_traceback(tmp_path):
    """It is the library's error for a word without a token, if there is no unknown token."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "?"}
    tokenizer = build_tokenizer("HFTokenizer", hf_file(tmp_path / "tokenizer.json", model=model))
    assert tokenizer.encode("a b").tolist() == [0, 1]
    with pytest.raises(TokenizerError, match="^the tokenizer.json cannot encode a text: .*token"):
        tokenizer.encode("a c")


AROUND = {"type": "TemplateProcessing", "pair": [], "special_tokens": {
    name: {"id": name, "ids": [i], "tokens": [name]}
    for i, name in ((4, "<s>"), (5, "<|endoftext|>"))
}, "single": [
    {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
    {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
]}  # fmt: skip


@pytest.mark.parametrize("kind", ["BPE", "WordLevel"])
def test_a_vocabulary_without_the_letter_a(tmp_path, kind):
    """DNA: "a" has no token in BPE, and is an error in WordLevel without an unknown token."""
    model = {"type": kind, "vocab": {"A": 0, "C": 1, "G": 2, "T": 3}}
    model |= {"merges": []} if kind == "BPE" else {"unk_token": "?"}
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    ends = [
        {"content": name, "id": i, "special": True, **flags}
        for i, name in ((4, "<s>"), (5, "<|endoftext|>"))
    ]
    path = hf_file(
        tmp_path / "tokenizer.json", model=model, post_processor=AROUND, added_tokens=ends,
        decoder={"type": "Fuse"},
    )  # fmt: skip
    tokenizer = build_tokenizer("HFTokenizer", path)
    assert tokenizer.begin == (4,)
    assert tokenizer.encode_prompt("G T" if kind == "WordLevel" else "GT") == [4, 2, 3]
    assert tokenizer.token_bytes(np.arange(6)).tolist() == [1, 1, 1, 1, 0, 0]
    for content, ends in (('{"eos_token": ["A"]}', {5}), ('{"eos_token": "T"}', {5, 3})):
        (tmp_path / "tokenizer_config.json").write_text(content)
        assert build_tokenizer("HFTokenizer", path).ends == ends


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 0}, "unk_token": "a"}
HOSTILE_JSON = [
    ({"model": WORDS}, "the id 0 of the token '[ab]' is of '[ab]' too"),
    ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}, "is not a tokenizer"),
    ({"model": {"type": "pickle", "vocab": {}}}, "is not a tokenizer.json"),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "is not a tokeni"),
    (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(" * 9}}},
        "is not a tokenizer.json",
    ),
    ({"added_tokens": []}, "has no token <|endoftext|>"),
    ({"version": 7}, "is not a tokenizer.json"),
]


@pytest.mark.parametrize("changes, message", HOSTILE_JSON)
def test_a_tokenizer_json(tmp_path, changes, message):
    path = hf_file(tmp_path / "tokenizer.json", **changes)
    with pytest.raises(TokenizerError, match=f"^{path}: {message}".replace("|", r"\|")):
        build_tokenizer("HFTokenizer", path)


def test_other_files(tmp_path):
    """Nesting that its parser refuses, and a SentencePiece model of random bytes."""
    path = tmp_path / "tokenizer.json"
    for content in (b"[" * 3000 + b"]" * 3000, b"{", b"\xff\xfe", b"null", b"7" * 5000):
        path.write_bytes(content)
        with pytest.raises(TokenizerError, match=f"^{path}: is not a tokenizer.json"):
            build_tokenizer("HFTokenizer", path)
    pytest.importorskip("sentencepiece")
    for content in (b"", b"\0" * 99, bytes(range(256))):
        path.write_bytes(content)
        with pytest.raises(TokenizerError, match=f"^{path}: "):
            build_tokenizer("SPMTokenizer", path)
