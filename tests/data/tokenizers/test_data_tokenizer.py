"""Test tokenizers: the published ids, round trips, bytes of each token, and messages."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.errors import TokenizerError
from megatron.data.tokenizers.base import best_dtype
from megatron.data.tokenizers.build import build_tokenizer

TEXT = st.text(st.characters(codec="utf-8"), max_size=60)


@pytest.fixture(scope="module")
def gpt2(gpt2_files):
    return build_tokenizer("GPT2BPETokenizer", *gpt2_files)


@pytest.fixture(scope="module")
def hf_file(gpt2, tmp_path_factory):
    """Write GPT-2's tokenizer.json with two added tokens: end of document, and several spaces."""
    backend = type(gpt2.reference).from_str(gpt2.reference.to_str())
    backend.add_special_tokens(["<|endoftext|>"])
    backend.add_tokens(["     "])
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    backend.save(str(path))
    return path


def test_published_ids(gpt2, parity):
    expected = json.loads((parity / "tokenizer_cases.json").read_text())
    assert (gpt2.vocab_size, gpt2.eod) == (expected["vocab_size"], expected["eod"])
    texts = [case["text"] for case in expected["cases"]]
    batch = gpt2.encode_batch(texts)
    assert len(texts) > 10
    for case, from_batch in zip(expected["cases"], batch, strict=True):
        ids = gpt2.encode(case["text"])
        assert ids.tolist() == from_batch.tolist() == case["ids"]
        assert ids.dtype == from_batch.dtype == np.uint16
        assert gpt2.decode(ids) == case["text"]


def test_published_shards_from_their_text(gpt2, parity, published_shards):
    lines = gzip.decompress((parity / "corpus.jsonl.gz").read_bytes()).splitlines()
    texts = [text for text in (json.loads(line)["text"] for line in lines) if text]
    assert len(texts) == len(published_shards) == 205
    for i, ids in enumerate(gpt2.encode_batch(texts)):
        assert published_shards.get(i).tolist() == [*ids.tolist(), gpt2.eod]


def test_dtype_by_vocabulary():
    assert best_dtype(257) == best_dtype(65499) == np.uint16
    assert best_dtype(65500) == best_dtype(10**6) == np.int32


@given(TEXT)
@pytest.mark.parametrize("kind", ["ByteLevelTokenizer", "CharLevelTokenizer", "GPT2BPETokenizer"])
def test_round_trip_and_bytes(gpt2, kind, text):
    tokenizer = gpt2 if kind == "GPT2BPETokenizer" else build_tokenizer(kind)
    if kind == "CharLevelTokenizer":
        text = text.replace("\0", "")  # its end of document
    ids = tokenizer.encode(text)
    assert isinstance(ids, np.ndarray) and ids.dtype == tokenizer.dtype == np.uint16
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
    sizes = tokenizer.token_bytes(ids)
    assert sizes.dtype == np.int64 and sizes.shape == ids.shape
    assert sizes.sum() == len(text.encode())
    if kind != "GPT2BPETokenizer":
        assert ids.tolist() == list(text.encode())


def test_end_of_document_and_strange_ids(gpt2):
    byte, char = build_tokenizer("ByteLevelTokenizer"), build_tokenizer("CharLevelTokenizer")
    assert (byte.vocab_size, byte.eod, char.vocab_size, char.eod) == (257, 256, 512, 0)
    for tokenizer in (byte, char, gpt2):
        a, b = tokenizer.encode("a").tolist(), tokenizer.encode("b").tolist()
        assert tokenizer.token_bytes(np.array([[tokenizer.eod, *a]])).tolist() == [[0, 1]]
        assert tokenizer.decode([*a, tokenizer.eod, *b]) == "a<|endoftext|>b"
        assert tokenizer.decode([*a, 60000, -1, *b]) == "a\ufffd\ufffdb"
        assert tokenizer.decode([]) == ""
        for wrong in (tokenizer.vocab_size, -1):
            with pytest.raises(TokenizerError, match=f"id {wrong} is outside .* another tokenizer"):
                tokenizer.token_bytes(np.array([*a, wrong]))
    assert byte.decode([0xE2, 0x98]) == "\ufffd"


def test_tokenizer_json(hf_file, gpt2):
    tokenizer = build_tokenizer("hftokenizer", hf_file)
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eod) == ("HFTokenizer", 50258, 50256)
    text = "naïve\n     <|endoftext|>x"
    ids = tokenizer.encode(text)
    assert ids.tolist()[-3:] == [50257, 50256, *gpt2.encode("x")]
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes(ids).sum() == len("naïve\n     x".encode())
    assert tokenizer.decode([*gpt2.encode("a"), 60000]) == "a\ufffd"


def test_fingerprints_tell_tokenizers_apart(gpt2, gpt2_files, hf_file, tmp_path):
    vocabulary, merges = gpt2_files
    fewer = tmp_path / "merges.txt"
    fewer.write_text("\n".join(merges.read_text(encoding="utf-8").split("\n")[:40000]), "utf-8")
    others = [
        build_tokenizer("ByteLevelTokenizer"),
        build_tokenizer("CharLevelTokenizer"),
        build_tokenizer("GPT2BPETokenizer", vocabulary, fewer),
        build_tokenizer("HFTokenizer", hf_file),
    ]
    prints = {tokenizer.fingerprint() for tokenizer in [gpt2, *others]}
    assert len(prints) == 5
    same = build_tokenizer("gpt2bpetokenizer", *gpt2_files)
    assert same.fingerprint() == gpt2.fingerprint()
    # Shards of earlier versions contain it, so it must not change.
    assert others[0].fingerprint().startswith("a70c4ee09c65")


@pytest.mark.parametrize("kind", ["ByteLevelTokenizer", "GPT2BPETokenizer"])
def test_text_that_is_not_valid_unicode(gpt2, kind):
    tokenizer = gpt2 if kind == "GPT2BPETokenizer" else build_tokenizer(kind)
    with pytest.raises(TokenizerError, match=r"character 2 is '\\ud800', half of a surrogate"):
        tokenizer.encode("ab\ud800")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("GPT2BPETokeniser",), "unknown type 'GPT2BPETokeniser'; did you mean GPT2BPETokenizer"),
        (("",), "unknown type ''; known: ByteLevelTokenizer, "),
        ((None,), "unknown type None; known"),
        (("gpt2",), "unknown type 'gpt2'; did you mean GPT2BPETokenizer"),
        (("SPMTokenizer",), r"vocab_file \(--vocab-file\): SPMTokenizer needs it .*\.model"),
        (("TiktokenTokenizer",), "TiktokenTokenizer is not built yet; use one of"),
        (("GPT2BPETokenizer",), r"vocab_file .*: GPT2BPETokenizer needs it .*vocab\.json"),
        (("GPT2BPETokenizer", "VOCAB"), r"merge_file .*: GPT2BPETokenizer needs it .*merges\.txt"),
        (("HFTokenizer", "/no/such"), "vocab_file: /no/such: no such file"),
        (("HFTokenizer", "BAD"), "bad: is not a tokenizer.json"),
        (("HFTokenizer", "VOCAB"), "vocab.json: is not a tokenizer.json"),
        (("GPT2BPETokenizer", "BAD", "MERGES"), r"bad: is not GPT-2's vocab\.json"),
        (("GPT2BPETokenizer", "LIST", "MERGES"), r"list: is not GPT-2's vocab\.json: not an obj"),
        (("GPT2BPETokenizer", "SMALL", "MERGES"), "small: lacks the byte symbols"),
        (("GPT2BPETokenizer", "VOCAB", "BAD"), r"bad:2: 'two' is not a merge"),
        (("GPT2BPETokenizer", "NOEOD", "MERGES"), r"noeod: has no token <\|endoftext\|>"),
    ],
)
def test_messages(gpt2_files, tmp_path, arguments, message):
    vocabulary = json.loads(gpt2_files[0].read_text(encoding="utf-8"))
    del vocabulary["<|endoftext|>"]
    files = {
        "VOCAB": gpt2_files[0],
        "MERGES": gpt2_files[1],
        "BAD": tmp_path / "bad",
        "LIST": tmp_path / "list",
        "SMALL": tmp_path / "small",
        "NOEOD": tmp_path / "noeod",
    }
    files["BAD"].write_text("one\ntwo\n")
    files["LIST"].write_text('["a"]')
    files["SMALL"].write_text('{"a": 0}')
    files["NOEOD"].write_text(json.dumps(vocabulary))
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(*(files.get(argument, argument) for argument in arguments))
