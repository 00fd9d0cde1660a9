"""The samples of a length task.

Sample i of a split is a function of the task, the run's seed, the split and i alone: the random
numbers of each sample have a generator of their own. Nothing is stored, and a data set may be
extended without changing earlier samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.data.errors import TaskError
from megatron.data.samples.interface import checked_indices
from megatron.data.samples.split import SPLITS
from megatron.data.tasks.base import Task

_MEASURED = len(SPLITS)  # the stream of random numbers of `examples_at`, after those of the splits


class TaskSamples:
    """The samples of one split. It implements `Samples`. Each sample holds one example.

    Args:
        seq_length: the number of inputs in a sample, which must have room for the longest example.
        name: the split: "train", "valid" or "test".
        extend_to: the length of the data set, if it is larger than `num_samples`.

    Raises:
        TaskError: the longest example does not fit into `seq_length`.
    """

    def __init__(
        self,
        task: Task,
        num_samples: int,
        seq_length: int,
        seed: int,
        name: str,
        extend_to: int = 0,
    ) -> None:
        self.task, self.seq_length, self.seed, self.name = task, seq_length, seed, name
        self.num_samples = self.published_length = num_samples
        self.where = f"builtin:{task.name}"
        self._length = max(num_samples, extend_to)
        inputs = task.width(task.max_length) - 1  # the last token is only a target
        if inputs > seq_length:
            raise TaskError(
                f"seq_length {seq_length}: an example of {task.name} of length {task.max_length} "
                f"has {inputs} inputs; write seq_length: {inputs}, or lower task_options.max_length"
            )

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the samples whose numbers are in `indices` [n], as int64 [n, seq_length + 1].

        Tokens that are no answer are stored as ~id (see `tasks.base`).

        Raises:
            DataExhausted: an index is outside the data set.
        """
        indices_N = checked_indices(self, indices, "raise train_iters (or extend_to)")
        out_NT = np.full((len(indices_N), self.seq_length + 1), ~self.task.tokenizer.eod, np.int64)
        for out_T, number in zip(out_NT, indices_N.tolist(), strict=True):
            rng = np.random.default_rng((self.seed, SPLITS.index(self.name), number))
            length = int(rng.integers(self.task.min_length, self.task.max_length + 1))
            row = self.task.row(rng, length)
            out_T[: len(row)] = row
        return out_NT


def examples_at(task: Task, length: int, count: int) -> np.ndarray:
    """Return `count` examples of one length as int64 [count, width], the same for every run.

    Tokens that are no answer are stored as ~id (see `tasks.base`).

    Raises:
        TaskError: the task's options do not allow this length.
    """
    streams = ((0, _MEASURED, length, number) for number in range(count))
    return np.stack([task.row(np.random.default_rng(each), length) for each in streams])
