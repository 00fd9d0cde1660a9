"""Tokenizers built with the `tokenizers` library, from tokenizer.json or from GPT-2's two files."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from megatron.data.errors import TokenizerError
from megatron.data.tokenizers import fast_bpe, gpt2
from megatron.data.tokenizers.base import END_OF_DOCUMENT, Tokenizer, check_utf8, fault_in_file

_MOST_IDS = 1 << 30  # more than any vocabulary has; a token takes up to 4 bytes in a shard


class HFTokenizer(Tokenizer):
    """A tokenizer read from a tokenizer.json file.

    Attributes:
        reference: The object of the `tokenizers` library that encodes and decodes.
    """

    name = "HFTokenizer"
    _known = "a"  # a text with a token of its own

    def __init__(self, vocab_file: str | Path) -> None:
        content = Path(vocab_file).read_bytes()
        with fault_in_file(f"{vocab_file}: is not a tokenizer.json"):
            text = content.decode("utf-8")
            # The fingerprint hashes this text, because the library's own dump varies by version.
            self._canonical = json.dumps(json.loads(text), sort_keys=True)
            self.reference = tokenizers.Tokenizer.from_str(text)
            self.reference.no_truncation()  # some files would cut each document short, silently
            self.reference.no_padding()
            if getattr(self.reference.model, "dropout", None):  # each text must have one encoding
                self.reference.model.dropout = None
            vocabulary, end = self.reference.get_vocab(with_added_tokens=True), END_OF_DOCUMENT
            self._known, template = _known_text(self.reference)
            self.begin = tuple(template.ids[: [*template.special_tokens_mask, 0].index(0)])
        own_end = _eos_token(Path(vocab_file).with_name("tokenizer_config.json")) or end
        if end not in vocabulary:
            self._canonical += f" {(end := own_end)}"
        self._set_sizes(vocabulary, str(vocab_file), end)
        self.ends = {self.eod, vocabulary.get(own_end, self.eod)}

    def _set_sizes(
        self, vocabulary: dict[str, int], source: str, end: str = END_OF_DOCUMENT
    ) -> None:
        tokens: dict[int, str] = {}
        for token, i in vocabulary.items():
            if not 0 <= i < _MOST_IDS or i in tokens:
                why = f"of {tokens[i]!r} too" if i in tokens else f"not one of 0 to {_MOST_IDS - 1}"
                raise TokenizerError(f"{source}: the id {i} of the token {token!r} is {why}")
            tokens[i] = token
        self.vocab_size = max(len(tokens), max(tokens, default=-1) + 1)
        eod = vocabulary.get(end)
        if eod is None:
            raise TokenizerError(
                f"{source}: has no token {end}, which ends a document (tokenizer.json may have "
                "another, which `eos_token` of a tokenizer_config.json beside it names)"
            )
        self.eod = eod

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        check_utf8(texts)
        with fault_in_file("the tokenizer.json cannot encode a text"):
            encodings = self.reference.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.decode_runs(
            ids, lambda run: self.reference.decode(run, skip_special_tokens=False)
        )

    def count_bytes(self, table: np.ndarray) -> None:
        # In byte-level vocabularies, each character of a token stands for a byte, but added tokens
        # are ordinary text. Tokens of other vocabularies, such as Gemma's added "▁▁", are decoded
        # after another token, because a decoder may leave out the first space of a text.
        before = self.reference.encode(self._known, add_special_tokens=False).ids
        alone = self.reference.decode(before, skip_special_tokens=False)
        added = self.reference.get_added_tokens_decoder()
        byte_level = "ByteLevel" in repr(self.reference.decoder)
        for token, i in self.reference.get_vocab(with_added_tokens=True).items():
            if i in added and (byte_level or added[i].special):
                table[i] = 0 if added[i].special else len(token.encode())
            elif byte_level:
                table[i] = len(token)
            else:
                text = self.reference.decode([*before, i], skip_special_tokens=False)[len(alone) :]
                # A byte that is no character by itself is decoded to U+FFFD.
                table[i] = 1 if text == "\ufffd" != token else len(text.encode())
        self._bytes_left_out = max(0, int(table.take(before).sum()) - len(alone.encode()))

    def _content(self) -> bytes:
        return self._canonical.encode()


def _known_text(reference: tokenizers.Tokenizer) -> tuple[str, Any]:
    """Return a text with a token of its own, and its encoding: "a", or a token's text."""

    # Vocabularies of DNA have no "a". Then it is an error, or gives no token.
    def candidates() -> Iterator[str]:
        yield "a"
        yield from sorted(reference.get_vocab(with_added_tokens=False))[:1000]

    for text in candidates():
        with suppress(Exception):
            encoding = reference.encode(text)
            if 0 in encoding.special_tokens_mask:
                return text, encoding
    raise ValueError("no token of the vocabulary has a text")


def _eos_token(path: Path) -> str | None:
    """Return the `eos_token` of a tokenizer_config.json, or None if the file or token is absent."""
    if not path.is_file():
        return None
    with fault_in_file(f"{path}: is not a tokenizer_config.json"):
        token = json.loads(path.read_bytes()).get("eos_token")
        token = token["content"] if isinstance(token, dict) else token
        return token if isinstance(token, str) else None


class GPT2BPETokenizer(HFTokenizer):
    """GPT-2's byte-level BPE, read from a vocab.json and a merges.txt.

    Args:
        backend: The library that encodes. All libraries give the same ids.

            - "tokenizers" is the reference and encodes with any vocabulary.
            - "tiktoken" is several times as fast, but works only with GPT-2's own merges.
            - "gigatoken" is faster still, and also works only with GPT-2's own merges.
            - "auto" chooses tiktoken if possible, and otherwise tokenizers.

    Attributes:
        backend: The name of the library that was chosen.
    """

    # The choice does not change the fingerprint. gigatoken must be installed separately. Each run
    # compares part of its output with the reference and stops at a difference (see `fast_bpe.py`).

    name = "GPT2BPETokenizer"

    def __init__(
        self, vocab_file: str | Path, merge_file: str | Path, backend: str = "auto"
    ) -> None:
        self._files = (vocab_file, merge_file)
        vocabulary, self._merge_bytes = (Path(file).read_bytes() for file in self._files)
        self._vocabulary = _read_vocabulary(vocabulary, vocab_file)
        self._set_sizes(self._vocabulary, str(vocab_file))
        self._published = gpt2.are_published_files(vocabulary, self._merge_bytes)
        gpt2_merges = self._published or gpt2.are_published_merges(self._vocabulary, self._merges)
        self.backend = fast_bpe.choose(backend, gpt2_merges)
        # Build the encoder now, to find out whether the files fit together and the backend works.
        # The published files are known to fit. With these, the encoder is built at the first text,
        # because training encodes no text.
        if not self._published or backend != "auto":
            self.load()

    @cached_property
    def _merges(self) -> list[tuple[str, str]]:
        return _read_merges(self._merge_bytes, self._files[1], self._vocabulary)

    @cached_property
    def reference(self) -> tokenizers.Tokenizer:
        """The tokenizer object of the `tokenizers` library, built when it is first used."""
        merges = self._merges
        with fault_in_file(f"{self._files[0]} and {self._files[1]} do not fit together"):
            model = models.BPE(vocab=self._vocabulary, merges=merges)
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    @cached_property
    def _fast(self) -> fast_bpe.Encode | None:
        return fast_bpe.build(self.backend, self._vocabulary, lambda: self.reference)

    @cached_property
    def _canonical(self) -> str:
        return json.dumps([self._vocabulary, self._merges], sort_keys=True)

    def load(self) -> None:
        if self._fast is None:
            self.reference  # noqa: B018  the property builds the tokenizer

    def fingerprint(self) -> str:
        return gpt2.FINGERPRINT if self._published else super().fingerprint()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        if self._fast is None:
            return super().encode_batch(texts)
        check_utf8(texts)
        encoded = self._fast(texts)
        for ids in encoded:
            # Cast to a smaller dtype, such an id would become the id of another token.
            if len(ids) and ids.max() >= self.vocab_size:
                raise TokenizerError(
                    f"{self.backend}: gave the id {ids.max()}, outside its vocabulary of "
                    f"{self.vocab_size}"
                )
        return [ids.astype(self.dtype) for ids in encoded]

    def count_bytes(self, table: np.ndarray) -> None:
        for token, i in self._vocabulary.items():
            table[i] = len(token)  # a token has one character per byte


def _read_vocabulary(content: bytes, path: str | Path) -> dict[str, int]:
    with fault_in_file(f"{path}: is not GPT-2's vocab.json"):
        vocabulary = json.loads(content.decode("utf-8"), object_pairs_hook=_distinct)
        if not isinstance(vocabulary, dict) or not all(type(i) is int for i in vocabulary.values()):
            raise ValueError("not an object of tokens and ids")
    if missing := sorted(c for c in pre_tokenizers.ByteLevel.alphabet() if c not in vocabulary):
        raise TokenizerError(f"{path}: lacks the byte symbols {''.join(missing[:20])!r}")
    return vocabulary


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict. Refuse an object in which a key occurs twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the token {twice!r} is named twice")
    return made


def _read_merges(
    content: bytes, path: str | Path, vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    merges: dict[tuple[str, ...], int] = {}  # merge -> line
    with fault_in_file(f"{path}: is not GPT-2's merges.txt"):
        lines = content.decode("utf-8").split("\n")
    first = lines[0].split()
    if len(first) == 2 and "".join(first) in vocabulary:
        raise TokenizerError(f"{path}:1: is a merge, not the version; put `#version: 0.2` above it")
    for number, line in enumerate(lines[1:], start=2):
        pair = tuple(line.split())
        if pair and (len(pair) != 2 or "".join(pair) not in vocabulary):
            raise TokenizerError(
                f"{path}:{number}: {line!r} is not a merge of two tokens into one of the vocabulary"
            )
        if pair in merges:
            raise TokenizerError(f"{path}:{number}: {line!r} is the merge of line {merges[pair]}")
        if pair:
            merges[pair] = number
    return cast(list[tuple[str, str]], list(merges))
