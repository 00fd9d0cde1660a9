"""What a data set offers to a loader, whether it is made of one corpus or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron.data.errors import DataExhausted


class Samples(Protocol):
    """Training samples by number, 0 to `len` - 1, each of `seq_length` + 1 tokens.

    Attributes:
        name: the split ("train", ...), for messages.
        num_samples: how many samples the order was built for.
        seq_length: tokens of a sample without its last label.
        published_length: the length of the data set that GPT-NeoX builds.
        where: the files, for messages.
    """

    name: str
    num_samples: int
    seq_length: int
    published_length: int

    @property
    def where(self) -> str: ...

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int] | np.ndarray, /) -> np.ndarray:
        """int64 [n, seq_length + 1]: the samples `indices`.

        Raises:
            DataExhausted: there is no such sample.
        """
        ...


def checked_indices(
    samples: Samples, indices: Sequence[int] | np.ndarray, remedy: str
) -> np.ndarray:
    """int64 [n]: `indices`, if `samples` has them all.

    Raises:
        DataExhausted: it has not; the message ends with `remedy`.
    """
    indices_N = np.asarray(indices, dtype=np.int64)
    if len(indices_N) and not 0 <= indices_N.min() <= indices_N.max() < len(samples):
        raise DataExhausted(
            f"{samples.name}: sample {indices_N.max()} of {len(samples)}; the order was built for "
            f"{samples.num_samples} samples: {remedy}"
        )
    return indices_N
