"""The samples of a length task.

Each sample has a random generator of its own, so sample i of a split depends only on the task, the
run's seed, the split and i. Samples are not stored. Extending a data set does not change its
earlier samples.
"""

import numpy as np

from megatron.data.errors import TaskError
from megatron.data.samples.base import Samples
from megatron.data.samples.split import SPLITS
from megatron.data.tasks.base import Task

_MEASURED = len(SPLITS)  # the stream of random numbers of `examples_at`, after those of the splits


class TaskSamples(Samples):
    """The samples of one split of a length task, such as copying n symbols.

    Each sample contains one example. A token of the question is stored as ~id, which is negative,
    because it is not a target.

    Args:
        num_samples, extend_to: The larger of the two is the number of samples in the data set.
        seq_length: The number of input tokens in a sample.
        name: The split: "train", "valid" or "test".

    Raises:
        TaskError: The longest example does not fit into `seq_length`.
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

    def fill(self, out_NT: np.ndarray, indices_N: np.ndarray) -> None:
        out_NT[:] = ~self.task.tokenizer.eod
        for out_T, number in zip(out_NT, indices_N.tolist(), strict=True):
            rng = np.random.default_rng((self.seed, SPLITS.index(self.name), number))
            length = int(rng.integers(self.task.min_length, self.task.max_length + 1))
            row = self.task.row(rng, length)
            out_T[: len(row)] = row


def examples_at(task: Task, length: int, count: int) -> np.ndarray:
    """Return `count` examples of the given length. Every run gets the same examples.

    Returns:
        int64 [count, number of tokens in an example]. A token of the question is stored as ~id,
        which is negative, because it is not a target.

    Raises:
        TaskError: The task's options do not allow this length.
    """
    streams = ((0, _MEASURED, length, number) for number in range(count))
    return np.stack([task.row(np.random.default_rng(each), length) for each in streams])
