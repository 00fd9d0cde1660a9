"""Average the losses of the steps between two log lines.

A resumed run continues its meter, so the average may contain steps of an earlier process.
"""

from collections.abc import Mapping
from typing import Any

import torch

from megatron.parallel.groups import Groups


class Meter:
    """Sums the losses and the times of the training steps since the last log line.

    Attributes:
        steps: The number of steps whose losses are in the sum. Skipped steps do not count.
        timed: The number of steps of this process whose times are in the sum.
    """

    def __init__(self, groups: Groups, state: Mapping[str, Any] | None = None):
        """Create an empty meter, or continue from the `state` of an earlier process's meter."""
        self.groups = groups
        self.reset()
        sums = (state or {}).get("losses")
        if state is not None and sums:
            self.steps = int(state.get("steps", 0))
            same = len(sums) == groups.data_size
            self._total += sums[groups.data_rank] if same else sum(sums) / len(sums)

    def reset(self) -> None:
        self.steps = self.timed = 0
        self._seconds = 0.0
        self._total = torch.zeros((), dtype=torch.float64, device=self.groups.device)

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of one more step. `loss` is this rank's loss, a 0-d tensor."""
        self._total += loss.detach().double()
        self.steps += 1

    def time(self, seconds: float) -> None:
        """Add the time of one more step. The time of a skipped step counts, too."""
        self._seconds += seconds
        self.timed += 1

    @property
    def seconds_per_step(self) -> float:
        return self._seconds / max(1, self.timed)

    def mean(self) -> float:
        """Return the mean loss over the counted steps and all data-parallel ranks.

        Every rank must call this method.
        """
        total = self.groups.sum_over_data(self._total.clone())
        return total.item() / (self.groups.data_size * self.steps) if self.steps else float("nan")

    def state(self) -> dict[str, Any]:
        """Return the number of counted steps, and each data-parallel rank's sum of losses.

        Every rank must call this method.
        """
        # From these JSON values, a resumed run computes the same mean as an uninterrupted run, bit
        # for bit.
        if not self.steps:
            return {}
        mine = (self.groups.data_rank, self._total.item())
        sums = dict(self.groups.gather_from_job(mine))
        return {"steps": self.steps, "losses": [sums[rank] for rank in sorted(sums)]}
