"""The base class of all data sets that the training loader reads."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from megatron.data.errors import DataExhausted


class Samples(ABC):
    """A data set of training samples, which are numbered from 0 to len(samples) - 1.

    Attributes:
        name: The name of the split ("train", ...), for error messages.
        num_samples: The number of samples that the run planned. The data set may be longer.
        seq_length: The number of inputs in a sample. A sample has `seq_length` + 1 tokens.
        published_length: The length that GPT-NeoX's data set has with the same settings.
        where: The paths of the token shards, for error messages.
        remedy: What to do if the data set is too short, for error messages.
    """

    # The order of the samples is built for `num_samples` samples.

    name: str
    num_samples: int
    seq_length: int
    published_length: int
    where: str
    remedy = "raise train_iters (or extend_to)"
    _length: int

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the samples with the numbers `indices`.

        Args:
            indices: The numbers of n samples.

        Returns:
            The tokens, int64 [n, seq_length + 1]. A token that does not count as a target is stored
            as ~id, which is negative.

        Raises:
            DataExhausted: An index is outside the data set.
        """
        indices_N = np.asarray(indices, dtype=np.int64)
        if len(indices_N) and not 0 <= indices_N.min() <= indices_N.max() < len(self):
            raise DataExhausted(
                f"{self.name}: sample {indices_N.max()} of {len(self)}; the order was built for "
                f"{self.num_samples} samples: {self.remedy}"
            )
        out_NT = np.empty((len(indices_N), self.seq_length + 1), dtype=np.int64)
        self.fill(out_NT, indices_N)
        return out_NT

    @abstractmethod
    def fill(self, out_NT: np.ndarray, indices_N: np.ndarray) -> None:
        """Write sample number `indices_N[i]` to row i of `out_NT`, for each i.

        Args:
            out_NT: Uninitialised memory, int64 [n, seq_length + 1].
            indices_N: The numbers of the samples, int64 [n], all from 0 to len(self) - 1.
        """
