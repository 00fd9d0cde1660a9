"""Which samples a rank reads at which step, and how many samples a run needs.

Samples are consumed in order, 0, 1, 2, .... A micro-step takes the next micro * dp samples; rank r
takes the rows [r * micro, (r + 1) * micro) of them. A global batch is gas (gradient accumulation
steps) such micro-steps in a row:

    sample(step, g, r, row) = step * global_batch + g * micro * dp + r * micro + row

A global batch is therefore the same set of samples for every number of ranks, and the position is
one number, the samples consumed. This is the order of GPT-NeoX (`DistributedBatchSampler` without
interleaving).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron.data.errors import DataExhausted, ShardError
from megatron.data.samples.interface import Samples


class TrainLoader:
    """Iterator of this rank's micro-batches, int64 [micro_batch, seq_length + 1].

    The only state is `consumed_samples`, the number of samples that all ranks together consumed.

    Args:
        vocab_size: refuse tokens that are not below it. Shards made by another program do not name
            their tokenizer, and on a GPU such a token ends in a device assert.

    `next` raises:
        DataExhausted: the samples are used up. (StopIteration would end a loop silently.)
        ShardError: a token is not below `vocab_size`.
    """

    def __init__(
        self,
        dataset: Samples,
        global_batch: int,
        micro_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        *,
        vocab_size: int | None = None,
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
        self.vocab_size = vocab_size

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    @property
    def micro_steps(self) -> int:
        """Micro-steps per global batch: the gradient accumulation steps."""
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
        if self.vocab_size is not None and (largest := int(batch_BT.max())) >= self.vocab_size:
            raise ShardError(
                f"{self.dataset.where}: holds token {largest}, but the tokenizer has only "
                f"{self.vocab_size}; set tokenizer_type, vocab_file and merge_file to what the "
                "shards were made with"
            )
        self.consumed_samples += step
        return batch_BT


def sample_counts(
    train_iters: int, eval_interval: int, eval_iters: int, train_batch_size: int
) -> tuple[int, int, int]:
    """How many samples the published code builds the train, valid and test index for.

    The order of the samples depends on these numbers:

        train   train_iters batches
        valid   an evaluation every `eval_interval` iterations and one at the end
        test    one evaluation

    An evaluation is `eval_iters` batches.
    """
    evaluations = train_iters // eval_interval + 1
    return (
        train_iters * train_batch_size,
        evaluations * eval_iters * train_batch_size,
        eval_iters * train_batch_size,
    )


def published_start(
    split: str,
    dataset: Samples,
    iteration: int,
    *,
    micro_batch: int,
    dp_size: int = 1,
    micro_steps: int = 1,
    eval_interval: int,
    eval_iters: int,
) -> int:
    """How many samples the published loader of `split` skips when it resumes at `iteration`.

    In micro-steps, with gas = `micro_steps`:

        train   iteration * gas
        valid   (iteration * gas // eval_interval) * eval_iters
        test    0

    The valid position counts micro-steps as iterations, so it is correct only for gas = 1. Train
    and valid positions wrap around at the number of complete micro-steps in the data set.
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
