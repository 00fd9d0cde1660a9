"""Faster libraries for GPT-2's BPE: token ids equal to those of `tokenizers`, sooner.

tiktoken merges, at each step, the adjacent pair whose concatenation has the lowest id. For GPT-2's
own vocabulary the ids follow the order of the merges and this is the same rule; other vocabularies
are left to `tokenizers`. gigatoken is young, so `CheckedBatches` compares it with the reference as
long as it runs: on texts made to be difficult, on the first texts of each process (64 KB), and on
one in 64 from then on.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from megatron.data.errors import TokenizerError
from megatron.data.tokenizers.base import END_OF_DOCUMENT

Encode = Callable[[list[str]], list[np.ndarray]]
BACKENDS = ("auto", "tiktoken", "tokenizers", "gigatoken")

# GPT-2's rule for cutting text into words before merging, written so that all but runs of white
# space is one automaton without backtracking (twice as fast as the usual spelling, same matches).
_WORDS = r"(?:'(?:[sdmt]|ll|ve|re)| ?(?:\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+))|\s+(?!\S)|\s"
# Its matcher gives up on longer runs of white space (its stack holds a million places); texts with
# such a run go through the reference.
_LONG_RUN = 250_000
_CHECK_FIRST = 1 << 16  # characters that a process compares at once
_CHECK_EVERY = 64  # of so many one from then on; not batch by batch: texts of a batch are alike
_DIFFICULT = (
    "",
    " ",
    "a",
    " a  b   c    \n\n \t d \r\n",
    "it's we'll they've I'm you're he'd IT'S 's 'S",
    "x" * 5000,
    " " * 5000 + "end",
    "\n" * 3000,
    "1234567890 3.14 1e-5 ½ ² ٣ Ⅷ",
    "naïve café – “quoted” … €100 ümläut ß ﬁ",
    "日本語のテキスト 中文 한국어 العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 \U0001f1e9\U0001f1ea e\u0301 \u200b\ufeff\u00a0\u2003\u3000x",
    "<|endoftext|> <|padding|> \x00\x01\x7f\x85\u2028\u2029",
    "def f(x):\n\treturn {k: v for k, v in x.items() if k != '__init__'}\n",
)


def choose(backend: str, own: bool) -> str:
    """The backend that `backend` means for vocabularies that are GPT-2's `own`, or not;
    TokenizerError if it cannot be."""
    if backend not in BACKENDS:
        raise TokenizerError(f"tokenizer backend {backend!r}: is none of {', '.join(BACKENDS)}")
    if backend == "auto":
        return "tiktoken" if own and find_spec("tiktoken") else "tokenizers"
    if backend != "tokenizers" and not own:
        raise TokenizerError(
            f"tokenizer backend {backend}: encodes GPT-2's own vocabulary and merges, not these; "
            "use tokenizers (auto does)"
        )
    return backend


def build(backend: str, vocabulary: dict[str, int], reference: Callable[[], Any]) -> Encode | None:
    """The function that encodes a batch; None where the reference itself does. `reference` builds
    the tokenizer of `tokenizers`, or gives the one that there is."""
    if backend == "tokenizers":
        return None
    by_reference = _by_tokenizers(reference)
    if backend == "tiktoken":
        return _tiktoken(vocabulary, by_reference)
    return _gigatoken(reference(), by_reference)


def _tiktoken(vocabulary: dict[str, int], reference: Encode) -> Encode:
    try:
        import tiktoken
    except ImportError:
        raise TokenizerError("tokenizer backend tiktoken: needs `pip install tiktoken`") from None
    byte_of = _byte_of_symbol()
    to_latin_1 = str.maketrans({symbol: chr(byte) for symbol, byte in byte_of.items()})
    # Tokens in no byte symbols are special ones, which text never becomes; nor eod, though tiktoken
    # knows it (with no special token at all, its search for one would match everywhere).
    ranks = {
        token.translate(to_latin_1).encode("latin-1"): i
        for token, i in vocabulary.items()
        if byte_of.keys() >= set(token) and token != END_OF_DOCUMENT
    }
    encoding = tiktoken.Encoding(
        "gpt2-from-files",
        pat_str=_WORDS,
        mergeable_ranks=ranks,
        special_tokens={END_OF_DOCUMENT: vocabulary[END_OF_DOCUMENT]},
    )
    long_run = re.compile(rf"\s{{{_LONG_RUN}}}")

    def encode(texts: list[str]) -> list[np.ndarray]:
        out = []
        for text in texts:
            if len(text) >= _LONG_RUN and long_run.search(text):
                out += reference([text])
            else:
                # As encode_ordinary, without a Python integer for every token.
                out.append(encoding.encode_to_numpy(text, disallowed_special=()))
        return out

    return encode


def _gigatoken(reference, by_reference: Encode) -> Encode:
    try:
        import gigatoken
    except ImportError:
        raise TokenizerError("tokenizer backend gigatoken: needs `pip install gigatoken`") from None
    backend = gigatoken.Tokenizer(reference)

    def encode(texts: list[str]) -> list[np.ndarray]:
        # Text as bytes, so that no text is ever taken for a special token's name.
        return [np.asarray(backend.encode(text)) for text in texts]

    return CheckedBatches("gigatoken", encode, by_reference)


class CheckedBatches:
    """A fast encoder that is compared with a reference while it works; TokenizerError where not
    equal."""

    def __init__(self, name: str, encode: Encode, reference: Encode) -> None:
        self.name, self._encode, self._reference = name, encode, reference
        self._seen = self._compared = 0  # characters
        for text, ids in zip(_DIFFICULT, encode(list(_DIFFICULT)), strict=True):
            self._compare(text, ids)

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._encode(texts)
        for text, ids in zip(texts, encoded, strict=True):
            if self._compared <= _CHECK_FIRST + self._seen // _CHECK_EVERY:
                self._compare(text, ids)
                self._compared += len(text)
            self._seen += len(text)
        return encoded

    def _compare(self, text: str, ids: np.ndarray) -> None:
        [wanted] = self._reference([text])
        if not np.array_equal(ids, wanted):
            raise TokenizerError(
                f"tokenizer backend {self.name}: differs from the reference on "
                f"{text[:60]!r}{'...' if len(text) > 60 else ''} ({len(ids)} ids against "
                f"{len(wanted)}); use tiktoken or tokenizers"
            )


def _by_tokenizers(reference: Callable[[], Any]) -> Encode:
    return lambda texts: [np.array(one.ids) for one in reference().encode_batch_fast(texts)]


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2 writes printable bytes as themselves, and the others as characters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(others)
    }
