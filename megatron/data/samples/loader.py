"""Which samples a rank reads at which step, and how many samples a run needs.

The samples of a `TokenDataset` are consumed in order, 0, 1, 2, ... A micro-step takes the next
micro * dp of them, and rank r the rows [r * micro, (r + 1) * micro) of those; a global batch is gas
such micro-steps in a row:

    sample(step, g, r, row) = step * global_batch + g * micro * dp + r * micro + row

so a global batch is the same set of samples for every number of ranks, and the position is one
number, the samples consumed. This is GPT-NeoX's order (its `DistributedBatchSampler` without
interleaving).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron.data.errors import DataExhausted
from megatron.data.samples.dataset import TokenDataset


class TrainLoader:
    """Iterator of this rank's micro-batches, int64 [micro_batch, seq_length + 1].

    `consumed_samples` counts the samples that ALL ranks have consumed; it is the whole state. Going
    past the last sample raises DataExhausted (never StopIteration, which would end a loop without a
    word).
    """

    def __init__(
        self,
        dataset: TokenDataset,
        global_batch: int,
        micro_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
    ) -> None:
        step = micro_batch * dp_size
        if micro_batch < 1 or global_batch < 1 or global_batch % step:
            raise ValueError(
                f"global batch {global_batch} is not a multiple of micro batch {micro_batch} x "
                f"{dp_size} data-parallel ranks"
            )
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"data-parallel rank {dp_rank} of {dp_size}")
        if consumed_samples < 0:
            raise ValueError(f"consumed_samples {consumed_samples} is negative")
        self.dataset, self.global_batch, self.micro_batch = dataset, global_batch, micro_batch
        self.dp_rank, self.dp_size, self.consumed_samples = dp_rank, dp_size, consumed_samples

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    @property
    def micro_steps(self) -> int:
        """Micro-steps to a global batch: the gradient accumulation steps."""
        return self.global_batch // (self.micro_batch * self.dp_size)

    @property
    def batches_left(self) -> int:
        """Micro-steps until DataExhausted."""
        return max(0, len(self.dataset) - self.consumed_samples) // (
            self.micro_batch * self.dp_size
        )

    def __next__(self) -> np.ndarray:
        step = self.micro_batch * self.dp_size
        if self.consumed_samples + step > len(self.dataset):
            raise DataExhausted(
                f"{self.dataset.name}: {self.consumed_samples} of {len(self.dataset)} samples are "
                f"consumed and a micro-step needs {step} more; the order was built for "
                f"{self.dataset.num_samples}: build the data set with a larger extend_to"
            )
        first = self.consumed_samples + self.dp_rank * self.micro_batch
        batch_BT = self.dataset.batch(np.arange(first, first + self.micro_batch))
        self.consumed_samples += step
        return batch_BT


def sample_counts(
    train_iters: int, eval_interval: int, eval_iters: int, train_batch_size: int
) -> tuple[int, int, int]:
    """Samples that the published code builds the train, valid and test index for.

    The order depends on them.

    train: iterations x batch. valid: one evaluation each `eval_interval` and one at the end,
    `eval_iters` batches each. test: `eval_iters` batches. With train_iters 0 (evaluation of a
    trained model): 0, one, one evaluation.
    """
    evaluations = train_iters // eval_interval + 1
    return (
        train_iters * train_batch_size,
        evaluations * eval_iters * train_batch_size,
        eval_iters * train_batch_size,
    )


def published_start(
    split: str,
    dataset: TokenDataset,
    iteration: int,
    *,
    micro_batch: int,
    dp_size: int = 1,
    micro_steps: int = 1,
    eval_interval: int,
    eval_iters: int,
) -> int:
    """Samples that the published loader of `split` skips when resumed at `iteration`.

    train: iteration * gas micro-steps. valid: (iteration * gas // eval_interval) * eval_iters,
    which counts micro-steps as iterations and so is the true position only with gas = 1. Both wrap
    around at the number of whole micro-steps in the data set. test: always 0. (gas = `micro_steps`,
    gradient accumulation steps.)
    """
    step = micro_batch * dp_size
    micro_steps_done = iteration * micro_steps
    if split == "valid":
        micro_steps_done = micro_steps_done // eval_interval * eval_iters
    elif split == "test":
        return 0
    elif split != "train":
        raise ValueError(f"split {split!r} is none of train, valid, test")
    return micro_steps_done % max(1, dataset.published_length // step) * step
