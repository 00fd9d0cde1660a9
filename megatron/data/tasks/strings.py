"""Tasks that rearrange a row of n symbols: `copy`, `reverse` and `sort`.

They are in the length generalization studies of Deletang et al. (2022, arXiv 2207.02098) and
Kazemnejad et al. (2023, arXiv 2305.19466). The symbols are drawn independently and uniformly.
"""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from megatron.data.tasks.base import ASKED, Example, Task, numbers, option, question


@dataclass(frozen=True)
class _Rearranged(Task):
    symbols: int = option(10, least=2)

    @property
    def words(self) -> tuple[str, ...]:
        return (ASKED, *numbers(self.symbols))

    def example(self, rng: np.random.Generator, length: int) -> Example:
        drawn = rng.integers(self.symbols, size=length).tolist()
        return question(list(map(str, drawn)), list(map(str, self.rearranged(drawn))))

    @abstractmethod
    def rearranged(self, drawn: list[int]) -> list[int]:
        """Return the answer for the symbols `drawn` of a question."""


@dataclass(frozen=True)
class Copy(_Rearranged):
    """The task of repeating a row of n symbols."""

    name = "copy"

    def rearranged(self, drawn: list[int]) -> list[int]:
        return drawn


@dataclass(frozen=True)
class Reverse(_Rearranged):
    """The task of writing a row of n symbols from its end to its start."""

    name = "reverse"

    def rearranged(self, drawn: list[int]) -> list[int]:
        return drawn[::-1]


@dataclass(frozen=True)
class Sort(_Rearranged):
    """The task of sorting a row of n symbols. Symbols may occur several times."""

    name = "sort"

    def rearranged(self, drawn: list[int]) -> list[int]:
        return sorted(drawn)
