"""Bring micro-batches to the device, as pairs of inputs and targets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from megatron.parallel.groups import Groups
from megatron.parallel.loss import UNCOUNTED, inputs_and_targets


def next_batches(
    batches: Iterator[np.ndarray], count: int, groups: Groups, uncounted_after: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the pair (inputs [B, T], targets [B, T]) of each of the next `count` micro-batches.

    No micro-batch is read in advance. So the samples read are always the samples used, which is
    what a checkpoint counts. While a micro-batch is read, a GPU still works on the previous one.

    Args:
        batches: This rank's micro-batches of B sequences with T targets each, int64 [B, T + 1].
        uncounted_after: The id of a token. Targets that follow it are replaced by `UNCOUNTED`, so
            that they do not count in the loss. None counts all targets.
    """
    for _ in range(count):
        inputs, targets = inputs_and_targets(on_device(next(batches), groups.device))
        if uncounted_after is not None:
            targets = targets.masked_fill(inputs == uncounted_after, UNCOUNTED)
        yield inputs, targets


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array as a tensor on `device`. On a CPU, the array and the tensor share memory.

    The array is first copied to page-locked memory. From there, the copy to a GPU is only queued,
    and this process continues at once. A copy from other memory might wait for all queued work.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
