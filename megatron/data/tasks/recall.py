"""The task `mqar`, multi-query associative recall (Arora et al. 2023, arXiv 2312.04927)."""

from dataclasses import dataclass

import numpy as np

from megatron.data.tasks.base import ASKED, Example, Task, option


@dataclass(frozen=True)
class Recall(Task):
    """The task of recalling values by their keys.

    An example first lists n pairs (key, value). It then lists the same pairs again in a random
    order. The values of this second list are the answer. The n keys are all different.
    """

    # Therefore n is at most `keys`. Values may occur several times.

    name = "mqar"
    limit = "keys"
    keys: int = option(64)
    values: int = option(16, least=2)

    @property
    def words(self) -> tuple[str, ...]:
        keys, values = range(self.keys), range(self.values)
        return (ASKED, *(f"k{i}" for i in keys), *(f"v{i}" for i in values))

    def example(self, rng: np.random.Generator, length: int) -> Example:
        keys = rng.choice(self.keys, length, replace=False).tolist()
        values = rng.integers(self.values, size=length).tolist()
        pairs = [(f"k{key}", f"v{value}") for key, value in zip(keys, values, strict=True)]
        asked = [pairs[i] for i in rng.permutation(length)]
        words = [word for pair in pairs for word in pair] + [ASKED]
        words += [word for pair in asked for word in pair]
        return words, [False] * (2 * length + 1) + [False, True] * length
