"""Damaged SentencePiece models: an error, or ids of the vocabulary."""

from __future__ import annotations

import io

import pytest
from hypothesis import example, given

from megatron.data.errors import TokenizerError
from megatron.data.tokenizers.build import build_tokenizer
from tests.fuzz.damage import damaged, in_time, written

sentencepiece = pytest.importorskip("sentencepiece")
TEXT = "the cat sat, 日本"


def trained() -> bytes:
    """A model of a few words."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "a dog ate the cat"] * 20),
        model_writer=model,
        vocab_size=40,
        user_defined_symbols=["<|endoftext|>"],
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=3,
    )
    return model.getvalue()


MODEL = trained()


@given(damaged([MODEL]))
@example(MODEL)
@example(b"")
@example(b"\0" * 99)
@example(MODEL.replace(b"\n\3\xe2\x96\x81", b"\n\3\xf2\x96\x81"))
def test_a_model(content: bytes) -> None:
    path = written("tokenizer.model", content)
    try:
        with in_time():
            tokenizer = build_tokenizer("SPMTokenizer", path)
            ids = tokenizer.encode(TEXT)
    except TokenizerError as error:
        assert str(path) in str(error)
        return
    assert ids.max(initial=0) < tokenizer.vocab_size
    assert tokenizer.token_bytes(ids).min(initial=0) >= 0
    tokenizer.decode(ids)
    if content == MODEL:
        assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat"
