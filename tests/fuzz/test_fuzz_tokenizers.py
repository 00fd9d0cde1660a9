"""Damaged tokenizer files: an error, or a tokenizer whose ids decode to the text."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from megatron.data.errors import TokenizerError
from megatron.data.tokenizers.build import build_tokenizer
from tests.fuzz.damage import damaged, in_time, written

SYMBOLS = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = {token: i for i, token in enumerate([*SYMBOLS, "he", "Ġt", "Ġthe", "<|endoftext|>"])}
VOCAB_JSON = json.dumps(VOCABULARY).encode()
MERGES = "#version: 0.2\nh e\nĠ t\nĠt he\n".encode()
TEXT = "the hé, then\n  \t<|endoftext|>日本 the"
ADDED = {"id": 3, "content": "<|endoftext|>", "special": True} | dict.fromkeys(
    ("single_word", "lstrip", "rstrip", "normalized"), False
)
TOKENIZER_JSON = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [ADDED],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "\\s+"}, "behavior": "Isolated"}
        | {"invert": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
        | {"use_regex": True},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    }
).encode()


@given(damaged([VOCAB_JSON]), damaged([MERGES]) | st.just(MERGES))
@example(VOCAB_JSON, MERGES)
@example(VOCAB_JSON.replace(b'"he": 256', b'"he": 0'), MERGES)
@example(VOCAB_JSON.replace(b'"he": 256', b'"he": 4294967552'), MERGES)
@example(VOCAB_JSON.replace(b'"he": 256', b'"he": ' + b"[" * 3000), MERGES)
@example(VOCAB_JSON, MERGES + b"h e\n")
@example(VOCAB_JSON, MERGES.partition(b"\n")[2])
def test_vocabulary_and_merges(vocabulary: bytes, merges: bytes) -> None:
    files = written("vocab.json", vocabulary), written("merges.txt", merges)
    try:
        with in_time():
            tokenizer = build_tokenizer("GPT2BPETokenizer", *files)
            ids = tokenizer.encode(TEXT)
    except TokenizerError as error:
        assert any(str(path) in str(error) for path in files), error
        return
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.token_bytes(ids).sum() == len(TEXT.encode())
    tokens = {i: token for token, i in json.loads(vocabulary).items()}
    assert len(tokens) == len(json.loads(vocabulary)) and max(tokens) < tokenizer.vocab_size


@given(damaged([TOKENIZER_JSON]))
@example(TOKENIZER_JSON)
@example(TOKENIZER_JSON.replace(b'"NFC"', b'"Precompiled", "precompiled_charsmap": "AAAA"'))
@example(TOKENIZER_JSON.replace(b'"b": 1', b'"b": 0'))
@example(
    b'{"truncation": {"max_length": 1, "strategy": "LongestFirst", "stride": 0},'
    + TOKENIZER_JSON[1:]
)
def test_a_tokenizer_json(content: bytes) -> None:
    path = written("tokenizer.json", content)
    try:
        with in_time():
            tokenizer = build_tokenizer("HFTokenizer", path)
            ids = tokenizer.encode("ab a b")
    except TokenizerError as error:
        assert str(path) in str(error)
        return
    assert ids.max(initial=0) < tokenizer.vocab_size
    tokenizer.token_bytes(ids)
    tokenizer.decode(ids)
    if content == TOKENIZER_JSON:
        assert ids.tolist() == [2, 0, 1]
