"""Encode GPT-2's BPE with libraries that are faster than `tokenizers` and give the same ids.

At each step, tiktoken merges the adjacent pair of tokens whose concatenation has the lowest id. BPE
prescribes the pair that comes first in the list of merges. In GPT-2's own vocabulary, the ids
follow the order of the merges, so the two rules choose the same pair. Other vocabularies must be
encoded with `tokenizers`.

gigatoken is a young project, so `CheckedBatches` compares the ids from gigatoken with the ids from
`tokenizers` throughout the run. Each process compares all `DIFFICULT_TEXTS`, and then all texts of
the data until it has compared `CHECK_FIRST` characters. After that, it compares only some texts,
which together contain about one in `CHECK_EVERY` of all characters.
"""

import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from megatron.data.errors import TokenizerError, needs_package
from megatron.data.tokenizers.base import END_OF_DOCUMENT

Encode = Callable[[list[str]], list[np.ndarray]]
BACKENDS = ("auto", "tiktoken", "tokenizers", "gigatoken")

# GPT-2's pattern that splits text into words before merging. This pattern is twice as fast as
# the usual one, because only runs of white space need backtracking. Both match the same words.
_WORDS = r"(?:'(?:[sdmt]|ll|ve|re)| ?(?:\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+))|\s+(?!\S)|\s"
# A text with a run of white space of this length is encoded by the reference library, because
# tiktoken's matcher fails on runs of several times this length (its stack holds a million entries).
_LONG_RUN = 250_000
CHECK_FIRST = 1 << 16
"""Each process compares all texts with the reference until it has compared this many characters."""
CHECK_EVERY = 256
"""After the first `CHECK_FIRST` characters, about one character in `CHECK_EVERY` is compared.

The reference is many times slower, so comparing more text would take much processor time. Single
texts are compared, not whole batches, because the texts of a batch resemble each other.
"""
DIFFICULT_TEXTS = (
    "", " ", "a", " a  b   c    \n\n \t d \r\n",
    "it's we'll they've I'm you're he'd IT'S 's 'S",
    "x" * 5000, " " * 5000 + "end", "\n" * 3000, "1234567890 3.14 1e-5 ½ ² ٣ Ⅷ",
    "naïve café – “quoted” … €100 ümläut ß ﬁ",
    "日本語のテキスト 中文 한국어 العربية עברית हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 \U0001f1e9\U0001f1ea e\u0301 \u200b\ufeff\u00a0\u2003\u3000x",
    "<|endoftext|> <|padding|> \x00\x01\x7f\x85\u2028\u2029",
    "def f(x):\n\treturn {k: v for k, v in x.items() if k != '__init__'}\n",
)  # fmt: skip


def choose(backend: str, gpt2_merges: bool) -> str:
    """Return the name of the library that encodes.

    Args:
        backend: The name of a library, or "auto" for the best one.
        gpt2_merges: Whether the tokenizer has GPT-2's own merges, which the faster libraries need.

    Raises:
        TokenizerError: The backend is unknown, or cannot encode with these merges.
    """
    if backend not in BACKENDS:
        raise TokenizerError(f"tokenizer backend {backend!r}: is none of {', '.join(BACKENDS)}")
    if backend == "auto":
        return "tiktoken" if gpt2_merges and find_spec("tiktoken") else "tokenizers"
    if backend != "tokenizers" and not gpt2_merges:
        raise TokenizerError(
            f"tokenizer backend {backend}: encodes GPT-2's vocabulary and merges, not these; "
            "use tokenizers (auto does)"
        )
    return backend


def build(backend: str, vocabulary: dict[str, int], reference: Callable[[], Any]) -> Encode | None:
    """Build the function that encodes a list of texts with the library `backend`.

    Args:
        backend: The name of the library.
        vocabulary: Maps each token to its id.
        reference: A function that returns the tokenizer object of the `tokenizers` library.

    Returns:
        The function, or None if `backend` is "tokenizers".
    """
    # `choose` returned the name. `reference` is called only if its object is needed. If the result
    # is None, the caller encodes with that object.
    if backend == "tokenizers":
        return None
    by_reference = _by_tokenizers(reference)
    if backend == "tiktoken":
        return _tiktoken(vocabulary, by_reference)
    return _gigatoken(reference(), by_reference)


def _tiktoken(vocabulary: dict[str, int], reference: Encode) -> Encode:
    with needs_package("tiktoken", "tokenizer backend tiktoken:", TokenizerError):
        import tiktoken
    byte_of = byte_of_symbol()
    to_latin_1 = str.maketrans({symbol: chr(byte) for symbol, byte in byte_of.items()})
    # No text is encoded to the end-of-document token, or to a token with characters that stand for
    # no byte, so `ranks` leaves these out. tiktoken gets end-of-document as a special token, since
    # without any special token, its search for special tokens would match everywhere.
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
        # `encode_to_numpy` gives the ids of `encode_ordinary` without a Python integer for each id.
        return [
            reference([text])[0]
            if len(text) >= _LONG_RUN and long_run.search(text)
            else encoding.encode_to_numpy(text, disallowed_special=())
            for text in texts
        ]

    return encode


def _gigatoken(reference, by_reference: Encode) -> Encode:
    with needs_package("gigatoken", "tokenizer backend gigatoken:", TokenizerError):
        import gigatoken
    backend = gigatoken.Tokenizer(reference)

    def encode(texts: list[str]) -> list[np.ndarray]:
        return [np.asarray(backend.encode(text)) for text in texts]

    return CheckedBatches("gigatoken", encode, by_reference)


class CheckedBatches:
    """A callable that encodes batches of texts with a fast library, and checks some of the ids.

    The ids of some texts are compared with the ids from the library `tokenizers`, the reference.

    Raises:
        TokenizerError: The library and the reference give different ids for a text.
    """

    def __init__(self, name: str, encode: Encode, reference: Encode) -> None:
        self.name, self._encode, self._reference = name, encode, reference
        self._seen = self._compared = 0  # numbers of characters
        for text, ids in zip(DIFFICULT_TEXTS, encode(list(DIFFICULT_TEXTS)), strict=True):
            self._compare(text, ids)

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        encoded = self._encode(texts)
        for text, ids in zip(texts, encoded, strict=True):
            if self._compared <= CHECK_FIRST + self._seen // CHECK_EVERY:
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


def byte_of_symbol() -> dict[str, int]:
    """Return a dict from each of GPT-2's 256 symbols to the byte that the symbol stands for."""
    # The symbol of a printable byte is the character with the same number. The symbols of the other
    # bytes, in increasing order, are U+0100, U+0101, ....
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = [*printable, *range(256, 256 + len(others))]
    return dict(zip(map(chr, symbols), [*printable, *others], strict=True))
