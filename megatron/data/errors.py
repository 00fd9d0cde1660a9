"""Errors of the data floor. Each message says what is wrong, in which file, and what to do."""

from __future__ import annotations


class DataError(Exception):
    """Any error that a user of the data floor can mend; the base of those below."""


class ShardError(DataError):
    """A `.bin`/`.idx` pair is missing, truncated, foreign, mismatched or in use."""


class TokenizerError(DataError):
    """A tokenizer cannot be built, or cannot encode a given text."""


class CorpusError(DataError):
    """A text source cannot be read, or an output is in the way."""


class DataExhausted(DataError):
    """More samples were asked for than the sample index was built for."""
