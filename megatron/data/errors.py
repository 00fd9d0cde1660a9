"""Errors of `megatron/data`. Each message names the fault, the file, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class DataError(Exception):
    """An error that the user can correct; the base class of those below."""


class ShardError(DataError):
    """A `.bin`/`.idx` pair is missing, truncated, foreign, mismatched or in use."""


class TokenizerError(DataError):
    """A tokenizer cannot be built, or cannot encode a given text."""


class CorpusError(DataError):
    """A text source cannot be read, or an output file is in the way."""


class DataExhausted(DataError):
    """More samples were requested than the sample index was built for."""


@contextmanager
def needs_package(package: str, feature: str, error: type[DataError]) -> Iterator[None]:
    """Report a failed import of the optional `package` as `error`, naming the install command."""
    try:
        yield
    except ImportError:
        raise error(f"{feature} needs `pip install {package}`") from None
