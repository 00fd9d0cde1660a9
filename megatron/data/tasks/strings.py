"""Tasks that rearrange a row of n symbols: `copy`, `unique_copy`, `reverse` and `sort`.

Deletang et al. (2022, arXiv 2207.02098) and Kazemnejad et al. (2023, arXiv 2305.19466) use these
tasks to study length generalization. The symbols are drawn independently and uniformly, except in
`unique_copy`, where all differ (Huang et al. 2024, arXiv 2410.02140).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatron.data.tasks.base import ASKED, Example, Task, numbers, option, question


@dataclass(frozen=True)
class _Rearranged(Task):
    rearranged: ClassVar[Callable[[list[int]], list[int]]]  # from a question to its answer
    symbols: int = option(10, least=2)

    @property
    def words(self) -> tuple[str, ...]:
        return (ASKED, *numbers(self.symbols))

    def example(self, rng: np.random.Generator, length: int) -> Example:
        # A task with a limit draws without repetition.
        drawn = rng.choice(self.symbols, length, replace=self.limit is None).tolist()
        return question(list(map(str, drawn)), list(map(str, self.rearranged(drawn))))


@dataclass(frozen=True)
class Copy(_Rearranged):
    """The task of repeating a row of n symbols."""

    name = "copy"
    rearranged = staticmethod(lambda drawn: drawn)


@dataclass(frozen=True)
class UniqueCopy(Copy):
    """The task of repeating a row of n symbols, all of which are different."""

    name = "unique_copy"
    limit = "symbols"
    symbols: int = option(100, least=2)


@dataclass(frozen=True)
class Reverse(_Rearranged):
    """The task of writing a row of n symbols in reverse order."""

    name = "reverse"
    rearranged = staticmethod(lambda drawn: drawn[::-1])


@dataclass(frozen=True)
class Sort(_Rearranged):
    """The task of sorting a row of n symbols. Symbols may occur several times."""

    name = "sort"
    rearranged = staticmethod(sorted)
