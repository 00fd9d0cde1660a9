"""Bring micro-batches to the device, as inputs and targets, and count the targets of a step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.parallel.groups import Groups
from megatron.parallel.loss import UNCOUNTED, inputs_and_targets


@dataclass(frozen=True)
class Counting:
    """The rules for counting targets in the loss, and for averaging the losses of the targets.

    Attributes:
        uncounted_after: The id of a token. Targets directly after this token do not count in the
            loss. None counts all targets.
        per_token: Whether all targets that count in a step have the same weight. If false, all
            micro-batches have the same weight, as in GPT-NeoX.
    """

    # A target that does not count is replaced by `UNCOUNTED`.

    uncounted_after: int | None = None
    per_token: bool = False

    def pair(self, tokens_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and the targets of sequences. Each target is the token after its input.

        Args:
            tokens_BS: B sequences with S tokens each, [B, S].

        Returns:
            (inputs, targets), two tensors [B, S - 1]. `UNCOUNTED` replaces each target that does
            not count in the loss.
        """
        inputs, targets = inputs_and_targets(tokens_BS)
        if self.uncounted_after is not None:
            targets = targets.masked_fill(inputs == self.uncounted_after, UNCOUNTED)
        return inputs, targets

    def divisor(self, arrays: Sequence[np.ndarray], groups: Groups) -> torch.Tensor:
        """Return the number by which to divide the sum of the losses of each micro-batch.

        With this divisor, all targets that count in a step have the same weight. The divisor is
        the mean number of such targets in a micro-batch, over the micro-batches of all ranks.

        Args:
            arrays: This rank's micro-batches of one step.
        """
        # The engine averages over micro-batches. If each loss is a sum divided by this number, the
        # average is the mean over all targets that count in the step.
        pairs = (self.pair(torch.from_numpy(array)) for array in arrays)
        counted = sum(int((targets != UNCOUNTED).sum()) for _, targets in pairs)
        total = groups.sum_over_data(torch.full((), counted, device=groups.device).double())
        return (total.clamp(min=1) / (len(arrays) * groups.data_size)).float()


ALL_TARGETS = Counting()


def next_batches(
    batches: Iterator[np.ndarray], count: int, groups: Groups, counting: Counting = ALL_TARGETS
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Yield (inputs [B, T], targets [B, T], divisor) of each of the next `count` micro-batches.

    Args:
        batches: This rank's micro-batches of B sequences with T targets each, int64 [B, T + 1].
        counting: The rules for averaging the losses. The divisor is the number by which the sum of
            a micro-batch's losses is divided. It is None if `counting.per_token` is false.
    """
    arrays: Iterable[np.ndarray] = (next(batches) for _ in range(count))
    divisor = None
    if counting.per_token:
        arrays = list(arrays)
        divisor = counting.divisor(arrays, groups)
    for array in arrays:
        yield *counting.pair(on_device(array, groups.device)), divisor


def cut(batches: Iterator[np.ndarray], length: int) -> Iterator[np.ndarray]:
    """Cut each micro-batch [B, S] into sequences of L inputs, and yield [B (S - 1) / L, L + 1].

    L is `length`. No target is lost: each sequence begins with the last target of the previous
    sequence.
    """
    for tokens_BS in batches:
        if tokens_BS.shape[1] > length + 1:
            windows = np.lib.stride_tricks.sliding_window_view(tokens_BS, length + 1, axis=1)
            tokens_BS = windows[:, ::length].reshape(-1, length + 1)
        yield tokens_BS


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array as a tensor on `device`. On a CPU, the array and the tensor share memory."""
    # A copy to a GPU is queued, and this function does not wait for the end of the copy.
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from other memory might wait for all queued work
    return tensor.to(device, non_blocking=True)
