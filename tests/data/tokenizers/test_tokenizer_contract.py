"""Test what every tokenizer promises: special tokens, bytes of tokens, and text token by token.

The tokenizers have the parts of published ones, and are built by libraries that this project did
not make.
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron.data.prepare.chunks import Chunk
from megatron.data.prepare.encode import EncodeOptions, Encoder
from megatron.data.tokenizers.build import build_tokenizer
from megatron.generation.text import UNFINISHED, Continuation
from tests.helpers.pipelines import PIPELINES, write_pipeline, write_sentencepiece

TEXTS = [
    "hi 你好 😀 end",
    "the cat sat on the mat, it's 12345 days",
    "  two spaces and a line\n\tof the dog \n",
    "if x:\n    the cat\n        the dog",
    "😀😀你",
    "é",
    " a",
]
BEGINS = {"llama2": "<s>", "mistral": "<s>", "gemma": "<s>", "llama3": "<|begin_of_text|>"}
OWN = ["ByteLevelTokenizer", "CharLevelTokenizer", "GPT2BPETokenizer"]


@pytest.fixture(scope="module", params=[*PIPELINES, *OWN, "SPMTokenizer", "SPMTokenizer of LLaMA"])
def tokenizer(request, tmp_path_factory):
    name, folder = request.param, tmp_path_factory.mktemp("tokenizer")
    if name in PIPELINES:
        return build_tokenizer("HFTokenizer", write_pipeline(name, folder))
    if name.startswith("SPM"):
        pytest.importorskip("sentencepiece")
        own = {} if "LLaMA" in name else {"user_defined_symbols": ["<|endoftext|>"]}
        return build_tokenizer("SPMTokenizer", write_sentencepiece(folder / "m.model", **own))
    files = request.getfixturevalue("gpt2_files") if name.startswith("GPT2") else ()
    return build_tokenizer(name, *files)


@pytest.fixture
def begin(tokenizer, request):
    """The ids that the published template puts before a text."""
    name = BEGINS.get(request.node.callspec.params["tokenizer"])
    return [] if name is None else [tokenizer.reference.token_to_id(name)]


@pytest.fixture
def texts(request):
    """The texts that this tokenizer can write.

    Metaspace loses the first space of a text, and T5's normalizer second spaces and line ends.
    """
    change = {"t5": lambda text: " ".join(text.split()), "mistral": lambda text: text.lstrip(" ")}
    return list(map(change.get(request.node.callspec.params["tokenizer"], str), TEXTS))


def document(tokenizer, text):
    return [*tokenizer.begin, *tokenizer.encode(text).tolist(), tokenizer.eod]


def test_special_tokens_stand_around_a_text_and_never_in_it(tokenizer, texts, begin):
    assert list(tokenizer.begin) == begin
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        assert not {*ids} & {*begin, tokenizer.eod} and tokenizer.decode(ids) == text
        assert ids == tokenizer.encode_batch([text])[0].tolist()
        assert tokenizer.encode_prompt(text) == [*begin, *ids]
    # Some tasks and chats write the beginning into the text.
    prompt = tokenizer.encode_prompt(tokenizer.decode(begin) + "hi")
    assert prompt[: len(begin)] == begin and not {*prompt[len(begin) :]} & {*begin}


@pytest.mark.parametrize("ends", [True, False])
def test_a_prepared_document_begins_and_ends_once(tokenizer, texts, begin, ends):
    records = [(f"text:{n}", text.encode()) for n, text in enumerate(texts)]
    chunk = Chunk(source=0, number=0, position=0, where="text", first=1, texts=records)
    made = Encoder(tokenizer, EncodeOptions(append_eod=ends))(chunk)
    assert not made.faults
    whole = [document(tokenizer, text)[: None if ends else -1] for text in texts]
    assert made.tokens[0].tolist() == sum(whole, []) and made.sizes[0].tolist() == [
        *map(len, whole)
    ]
    assert made.tokens[0].dtype == tokenizer.dtype and made.counts["tokens"] == sum(map(len, whole))


def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer, texts):
    ids = np.array(sum((document(tokenizer, text) for text in ["", *texts, *texts]), []))
    expected = 2 * sum(len(text.encode()) for text in texts)
    assert tokenizer.token_bytes(ids)[1:].sum() == expected
    for length in (1, 3, 8):  # sequences whose first input is the last target before
        cut = len(ids) - 1 - (len(ids) - 1) % length
        rows = np.stack([ids[at : at + length + 1] for at in range(0, cut, length)])
        rest = tokenizer.token_bytes(ids[cut:])[1:].sum()
        assert tokenizer.token_bytes(rows)[:, 1:].sum() + rest == expected
    assert (tokenizer.token_bytes(ids) >= 0).all()


def continued(tokenizer, prompt, ids):
    emitted = []
    row = Continuation(tokenizer, prompt, emit=emitted.append)
    for token in ids:
        row.add(token)
        assert not emitted or not emitted[-1].endswith(UNFINISHED)
    row.finish("length")
    assert "".join(emitted) == row.text
    return row.text


def test_text_that_arrives_token_by_token_is_the_text_of_all_tokens(tokenizer, texts):
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        for at in range(1, len(ids) + 1):
            known = tokenizer.decode(ids[:at])
            if not known.endswith(UNFINISHED):
                prompt = [*tokenizer.begin, *ids[:at]]
                assert known + continued(tokenizer, prompt, ids[at:]) == text


def test_a_character_that_is_cut_off_spoils_no_other(tokenizer):
    prompt, ids = (tokenizer.encode(text).tolist() for text in ("hi", "hi 你好😀"))
    found = continued(tokenizer, prompt, ids[len(prompt) : -1])
    assert found in (" 你好", *(" 你好" + UNFINISHED * n for n in (1, 2, 3)))


def test_invalid_bytes_are_passed_on_and_spoil_no_later_text(tokenizer, monkeypatch):
    """An untrained model writes such bytes for ever, and each must cost the same."""
    byte = tokenizer.encode("😀").tolist()[-1]
    text, decode, sizes = tokenizer.encode("hi the cat").tolist(), tokenizer.decode, []
    monkeypatch.setattr(tokenizer, "decode", lambda ids: sizes.append(len(ids)) or decode(ids))
    row = Continuation(tokenizer, text)
    for token in [*[byte] * 100, *text]:
        row.add(token)
    row.finish("length")
    assert row.text.endswith("hi the cat") and max(sizes) < len(text) + 16
    assert len(row.text) >= 99 + len("hi the cat")
