"""The interface of data sets that the training loader reads, for one corpus or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron.data.errors import DataExhausted


class Samples(Protocol):
    """A data set of training samples, which are numbered from 0 to len(samples) - 1.

    Attributes:
        name: The name of the split ("train", ...), for error messages.
        num_samples: The number of samples for which the order was built. The data set may be
            longer.
        seq_length: The number of inputs in a sample. A sample has `seq_length` + 1 tokens.
        published_length: The length that GPT-NeoX's data set has with the same settings.
        where: The paths of the token shards, for error messages.
    """

    name: str
    num_samples: int
    seq_length: int
    published_length: int
    where: str

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int] | np.ndarray, /) -> np.ndarray:
        """Return the samples whose numbers are in `indices` [n], as int64 [n, seq_length + 1].

        A token that does not count as a target is stored as ~id, which is negative.

        Raises:
            DataExhausted: an index is outside the data set.
        """
        ...


def checked_indices(
    samples: Samples, indices: Sequence[int] | np.ndarray, remedy: str
) -> np.ndarray:
    """Return `indices` as int64 [n], after checking that `samples` contains all of them.

    Args:
        remedy: Advice to the user for the end of the error message.

    Raises:
        DataExhausted: an index is outside the data set.
    """
    indices_N = np.asarray(indices, dtype=np.int64)
    if len(indices_N) and not 0 <= indices_N.min() <= indices_N.max() < len(samples):
        raise DataExhausted(
            f"{samples.name}: sample {indices_N.max()} of {len(samples)}; the order was built for "
            f"{samples.num_samples} samples: {remedy}"
        )
    return indices_N
