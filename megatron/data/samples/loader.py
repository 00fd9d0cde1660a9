"""The training loader. It decides which samples each rank reads at each step.

Samples are consumed in the order 0, 1, 2, .... In each micro-step, the `dp` data-parallel ranks
together read the next micro * dp samples, where `micro` is the micro-batch size. Of these samples,
rank r reads the numbers r * micro to (r + 1) * micro - 1. A global batch consists of consecutive
micro-steps, one for each gradient accumulation step g. Row `row` of rank r's micro-batch contains

    sample(step, g, r, row) = step * global_batch + g * micro * dp + r * micro + row

Therefore a global batch contains the same samples for every number of ranks. The number of consumed
samples is the complete state of the loader. The order is the same as in GPT-NeoX's
`DistributedBatchSampler` without interleaving.
"""

from collections.abc import Iterator

import numpy as np

from megatron.data.errors import DataExhausted, ShardError
from megatron.data.samples.base import Samples


class TrainLoader:
    """An iterator over this rank's micro-batches, each int64 [micro_batch, seq_length + 1].

    The iterator's only state is `consumed_samples`, the number of samples that all ranks have
    consumed in total.

    Args:
        global_batch: The number of samples in a global batch, a multiple of micro_batch * dp_size.
        micro_batch: The number of samples in a micro-batch of one rank.
        vocab_size: The tokenizer's vocabulary size. Every token id must be smaller than
            `vocab_size`. None means that token ids are not checked.

    Attributes:
        micro_steps: The number of micro-steps (gradient accumulation steps) in a global batch.
        step_samples: The number of samples that all ranks together read in a micro-step.

    Raises:
        DataExhausted: From `next`, if too few samples are left.
        ShardError: From `next`, if a token is not smaller than `vocab_size`.
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
        self.dataset, self.global_batch, self.micro_batch = dataset, global_batch, micro_batch
        self.dp_rank, self.dp_size, self.consumed_samples = dp_rank, dp_size, consumed_samples
        self.vocab_size, self.step_samples = vocab_size, micro_batch * dp_size
        self.micro_steps = global_batch // self.step_samples

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    @property
    def batches_left(self) -> int:
        """The number of micro-batches that are left for this rank."""
        return max(0, len(self.dataset) - self.consumed_samples) // self.step_samples

    def __next__(self) -> np.ndarray:
        step = self.step_samples
        if self.consumed_samples + step > len(self.dataset):
            raise DataExhausted(  # not StopIteration, which would end a `for` loop silently
                f"{self.dataset.name}: {self.consumed_samples} of {len(self.dataset)} samples are "
                f"consumed and a micro-step needs {step} more; the order was built for "
                f"{self.dataset.num_samples}: build the data set with a larger extend_to"
            )
        first = self.consumed_samples + self.dp_rank * self.micro_batch
        batch_BT = self.dataset.batch(np.arange(first, first + self.micro_batch))
        # On a GPU, such a token would cause a device assert that does not name the cause.
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
    """Return the minimum numbers of samples in GPT-NeoX's train, valid and test indices.

    The training index is built for `train_iters` batches. The validation index is built for one
    evaluation every `eval_interval` iterations and one at the end. The test index is built for one
    evaluation. Each evaluation reads `eval_iters` batches.
    """
    evaluations = train_iters // eval_interval + 1
    return (
        train_iters * train_batch_size,
        evaluations * eval_iters * train_batch_size,
        eval_iters * train_batch_size,
    )


def published_start(
    loader: TrainLoader, split: str, iteration: int, *, eval_interval: int, eval_iters: int
) -> int:
    """Return how many samples GPT-NeoX's loader skips when it resumes at `iteration`.

    The skipped samples form complete micro-steps, each with `loader.step_samples` samples. The
    number of skipped micro-steps is

        train   iteration * loader.micro_steps
        valid   (iteration * loader.micro_steps // eval_interval) * eval_iters
        test    0

    For train and valid, this number is taken modulo the number of complete micro-steps in the
    data set.

    Args:
        split: "train", "valid" or "test".
    """
    # GPT-NeoX's formula for valid is right only if `loader.micro_steps` is 1. It is kept as it is.
    micro_steps_done = iteration * loader.micro_steps
    if split == "valid":
        micro_steps_done = micro_steps_done // eval_interval * eval_iters
    elif split == "test":
        return 0
    step = loader.step_samples
    return micro_steps_done % max(1, loader.dataset.published_length // step) * step
