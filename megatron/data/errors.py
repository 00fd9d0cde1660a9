"""Errors that the package `megatron.data` raises.

Each error text names the fault, the file and the remedy.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.errors import UserError


class DataError(UserError):
    """Base class of the errors about text and tokens that the user can correct."""


class ShardError(DataError):
    """A token shard (.bin and .idx file) is missing, damaged, in use, or of unknown format."""


class TokenizerError(DataError):
    """A tokenizer cannot be built, or cannot encode a given text."""


class CorpusError(DataError):
    """A text source cannot be read, or its token shards cannot be written."""


class TaskError(DataError):
    """The name of a length task is unknown, or the task does not accept an option or a length.

    A length task, such as copying symbols, tests a model on longer examples than in training.
    """


class DataExhausted(DataError):
    """A sample was requested beyond the last sample of the data set."""


@contextmanager
def needs_package(package: str, feature: str, error: type[DataError]) -> Iterator[None]:
    """Turn an ImportError in the `with` block into an `error` that tells how to install `package`.

    Args:
        package: The name of the package for `pip install`.
        feature: The name of the feature that needs the package, for the error message.
        error: The type of the exception to raise.
    """
    try:
        yield
    except ImportError:
        raise error(f"{feature} needs `pip install {package}`") from None
