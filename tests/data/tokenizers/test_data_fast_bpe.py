"""Test the encoding libraries: each gives the reference's ids, or raises an error."""

from __future__ import annotations

import io
import json
import pickle
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.errors import TokenizerError
from megatron.data.tokenizers import fast_bpe
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.bpe import HFTokenizer
from megatron.data.tokenizers.build import build_tokenizer

BACKENDS = ("tiktoken", "gigatoken")


@pytest.fixture(scope="module")
def by_backend(gpt2_files):
    return {name: build_tokenizer("GPT2BPETokenizer", *gpt2_files, name) for name in BACKENDS}


def assert_exact(tokenizer, texts: list[str]) -> None:
    """Compare the ids of `tokenizer` with those of the reference, the `tokenizers` library."""
    reference = HFTokenizer.encode_batch(tokenizer, texts)
    for text, got, wanted in zip(texts, tokenizer.encode_batch(texts), reference, strict=True):
        assert np.array_equal(got, wanted), repr(text[:80])


@pytest.mark.parametrize("name", BACKENDS)
def test_published_ids(by_backend, parity, name):
    cases = json.loads((parity / "tokenizer_cases.json").read_text())["cases"]
    assert len(cases) > 10
    for case in cases:
        assert by_backend[name].encode(case["text"]).tolist() == case["ids"]


PIECES = st.sampled_from(
    [*" \t\n\r\u00a0\u3000\u2028'sdtmlve.,!?aZ09éß日½²_-—\u0301\U0001f600", "'ll"]
)


@pytest.mark.parametrize("name", BACKENDS)
@given(st.lists(PIECES, max_size=60).map("".join))
def test_made_up_text(by_backend, name, text):
    assert_exact(by_backend[name], [text])


@pytest.mark.parametrize("name", BACKENDS)
def test_every_kind_of_character(by_backend, name):
    """Characters of each Unicode category, next to letters, digits, spaces and quotes."""
    by_category: dict[str, list[str]] = {}
    for code in range(0x110000):
        character = chr(code)
        category = unicodedata.category(character)
        if category != "Cs":
            by_category.setdefault(category, []).append(character)
    assert len(by_category) == 29
    rng = np.random.default_rng(0)
    chosen = [c for group in by_category.values() for c in rng.choice(group, min(60, len(group)))]
    assert_exact(by_backend[name], [f"a{c}b {c}{c} {c}1{c} 's{c}  {c}\n\n{c}" for c in chosen])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("text", [" " * 1_200_000 + "x", "\n" * 300_000, "x" * 100_000, "é" * 9999])
def test_long_runs(by_backend, name, text):
    assert_exact(by_backend[name], [text])


def test_half_a_surrogate_pair_is_an_error(by_backend):
    for tokenizer in by_backend.values():
        with pytest.raises(TokenizerError, match="half of a surrogate pair"):
            tokenizer.encode("a\ud800")


def test_who_encodes(gpt2_files, tmp_path, monkeypatch):
    assert build_tokenizer("GPT2BPETokenizer", *gpt2_files).backend == "tiktoken"
    monkeypatch.setattr(fast_bpe, "find_spec", lambda name: None)
    assert build_tokenizer("GPT2BPETokenizer", *gpt2_files).backend == "tokenizers"
    monkeypatch.undo()
    merges = tmp_path / "merges.txt"  # GPT-2's merges without the last one
    merges.write_text(gpt2_files[1].read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[0])
    assert build_tokenizer("GPT2BPETokenizer", gpt2_files[0], merges).backend == "tokenizers"
    with pytest.raises(TokenizerError, match="tiktoken: encodes GPT-2's vocabulary"):
        build_tokenizer("GPT2BPETokenizer", gpt2_files[0], merges, "tiktoken")
    with pytest.raises(TokenizerError, match="'fastest': is none of auto, tiktoken"):
        build_tokenizer("GPT2BPETokenizer", *gpt2_files, "fastest")


def test_backends_share_a_fingerprint(by_backend, gpt2_files, tmp_path):
    """The stored fingerprint is the same, too, and so is that of a reformatted vocab.json."""
    other = tmp_path / "vocab.json"
    other.write_text(json.dumps(json.loads(gpt2_files[0].read_text("utf-8")), indent=1), "utf-8")
    given = [(*gpt2_files, "tokenizers"), (*gpt2_files, "auto"), (other, gpt2_files[1], "auto")]
    plain, known, reread = (build_tokenizer("GPT2BPETokenizer", *each) for each in given)
    assert known.backend == reread.backend == "tiktoken"
    prints = {t.fingerprint() for t in (plain, known, reread, *by_backend.values())}
    assert prints == {Tokenizer.fingerprint(plain)}
    by_library = np.zeros(50257, np.int64)
    HFTokenizer.count_bytes(known, by_library)
    by_library[known.eod] = 0
    assert np.array_equal(known.token_bytes(np.arange(50257)), by_library)


def test_a_backend_that_differs_is_refused(monkeypatch):
    def reference(texts):
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def off_on_x(texts):
        return [
            ids[:-1] if "x1" in text else ids
            for text, ids in zip(texts, reference(texts), strict=True)
        ]

    with pytest.raises(TokenizerError, match=r"quick: differs from the reference on ''"):
        fast_bpe.CheckedBatches(
            "quick",
            lambda texts: [ids[1:] for ids in reference(["?" + t + "?" for t in texts])],
            reference,
        )
    checked = fast_bpe.CheckedBatches("quick", off_on_x, reference)
    with pytest.raises(TokenizerError, match="quick: differs from the reference on 'x1'"):
        checked(["good", "x1"])  # the first texts are compared
    monkeypatch.setattr(fast_bpe, "CHECK_FIRST", 0)
    checked = fast_bpe.CheckedBatches("quick", off_on_x, reference)
    assert checked(["good!"])[0].tolist() == [*b"good!"]
    every = fast_bpe.CHECK_EVERY
    checked(["x1"] * ((5 * every - 5) // 2))  # comparing 5 characters covers 5 x 256
    with pytest.raises(TokenizerError, match="quick: differs from the reference on 'x1'"):
        checked(["x1"] * 2)


def test_what_is_compared_is_spread_over_all_texts(monkeypatch):
    compared = []

    def reference(texts):
        compared.extend(texts)
        return [np.zeros(1)] * len(texts)

    checked = fast_bpe.CheckedBatches("quick", lambda texts: [np.zeros(1)] * len(texts), reference)
    assert compared == list(fast_bpe.DIFFICULT_TEXTS)
    compared.clear()
    texts = [f"{i:01000}" for i in range(10_000)]
    for start in range(0, len(texts), 50):
        checked(texts[start : start + 50])
    first = fast_bpe.CHECK_FIRST // 1000 + 1
    assert compared[:first] == texts[:first]
    places = np.array([int(text) for text in compared[first:]])
    assert len(places) >= (10_000 - first) // fast_bpe.CHECK_EVERY
    assert np.diff(places).max() <= fast_bpe.CHECK_EVERY + 1 and places[-1] > 9_700


def test_sentencepiece(tmp_path):
    import sentencepiece

    text = [f"the distance kernel {i} is logarithmic\n" for i in range(200)]

    def train(**options) -> bytes:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text), model_writer=model, vocab_size=300, model_type="bpe",
            byte_fallback=True, hard_vocab_limit=False, minloglevel=2, **options,
        )  # fmt: skip
        return model.getvalue()

    path = tmp_path / "a.model"
    path.write_bytes(train(user_defined_symbols=["<|endoftext|>"]))
    tokenizer = build_tokenizer("SPMTokenizer", path)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    sample = "the kernel of 日本 distance"
    ids = tokenizer.encode(sample)
    assert ids.tolist() == processor.encode(sample) and ids.dtype == tokenizer.dtype
    assert tokenizer.decode(ids) == sample
    assert tokenizer.vocab_size == processor.get_piece_size()
    assert tokenizer.eod == processor.piece_to_id("<|endoftext|>")
    # The model puts a space before the first word.
    assert tokenizer.token_bytes(ids).sum() == len(sample.encode()) + 1
    assert tokenizer.token_bytes(np.array([tokenizer.eod])).tolist() == [0]
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(sample).tolist() == ids.tolist() and copy.eod == tokenizer.eod
    assert copy.fingerprint() == tokenizer.fingerprint()
    path.write_bytes(train())
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert build_tokenizer("SPMTokenizer", path).eod == processor.eos_id() >= 0
    path.write_bytes(train(eos_id=-1))
    with pytest.raises(TokenizerError, match=r"neither a piece <\|endoftext\|> nor an end of a"):
        build_tokenizer("SPMTokenizer", path)
    path.write_bytes(b"no model")
    with pytest.raises(TokenizerError, match="is not a SentencePiece model"):
        build_tokenizer("SPMTokenizer", path)
