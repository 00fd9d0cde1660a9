"""The interface of length tasks.

An example of length n is a row of tokens. Some of its tokens form the answer. Only these tokens
count in the loss and in the accuracy. A row is an int64 array that contains

    id     for a token of the answer            (0, 1, ...)
    ~id    for any other token                  (-1, -2, ...)

so one array contains the tokens and marks the answer. After the example, the row is filled up with
`END_OF_DOCUMENT` (id 0), which is not part of the answer. Therefore a model does not learn where an
answer ends. This is not needed, because the length of an example determines the length of the
answer. Models that do not learn where to stop extrapolate better (Newman et al. 2020, arXiv
2010.07174).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from megatron.data.errors import TaskError
from megatron.data.tasks.vocabulary import TaskTokenizer

ASKED = "="
"""The token between the question and the answer."""
Example = tuple[list[str], list[bool]]
"""The tokens of an example, and whether each token belongs to the answer."""


def option(default: int | bool, least: int = 1) -> Any:
    """Return a dataclass field for an option of a task.

    Args:
        default: The default value of the option.
        least: The smallest allowed value of an option that is a whole number.
    """
    return field(default=default, metadata={"least": least})


def numbers(count: int) -> tuple[str, ...]:
    """Return the tokens "0", "1", ... of the numbers below `count`."""
    return tuple(map(str, range(count)))


def question(asked: Sequence[str], answer: Sequence[str]) -> Example:
    """Return the example with the tokens of `asked`, the token `=`, and the tokens of `answer`."""
    return [*asked, ASKED, *answer], [False] * (len(asked) + 1) + [True] * len(answer)


@dataclass(frozen=True)
class Task(ABC):
    """Base class of the length tasks, such as copying n symbols.

    A model is trained on short examples of the task, and its accuracy is measured on longer ones.
    The dataclass fields of a task are its options.

    Attributes:
        name: The name of the task in `data_path: builtin:NAME`.
        min_length: The shortest length in training.
        max_length: The longest length in training.
        limit: The name of the option whose value is the largest possible length, or None.
    """

    # All lengths from `min_length` to `max_length` are equally frequent.

    name: ClassVar[str]
    limit: ClassVar[str | None] = None
    min_length: int = option(1)
    max_length: int = option(20)

    @property
    @abstractmethod
    def words(self) -> tuple[str, ...]:
        """Every token that an example may contain."""

    @abstractmethod
    def example(self, rng: np.random.Generator, length: int) -> Example:
        """Draw an example. The number of its tokens depends on `length` alone."""

    @cached_property
    def tokenizer(self) -> TaskTokenizer:
        """The tokenizer of the task's vocabulary."""
        return TaskTokenizer(self.words)

    def require(self, length: int, advice: str = "lower the lengths") -> None:
        """Check that the task can make examples of this length.

        Args:
            length: The length.
            advice: What the user can do if it cannot.

        Raises:
            TaskError: The task's options do not allow this length.
        """
        most = getattr(self, self.limit) if self.limit else length
        if length > most:
            raise TaskError(
                f"{self.name} has no examples of length {length}: task_options.{self.limit} is "
                f"{most}; {advice}"
            )

    def row(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """Draw an example and return its tokens as int64 [number of tokens].

        A token of the question is stored as ~id, which is negative, because it is not a target.

        Raises:
            TaskError: The options do not allow this length.
        """
        self.require(length)
        words, is_answer = self.example(rng, length)
        ids = np.array([self.tokenizer.ids[word] for word in words], np.int64)
        return np.where(is_answer, ids, ~ids)

    def width(self, length: int) -> int:
        """Return the number of tokens in an example of this length."""
        return len(self.row(np.random.default_rng(0), length))

    @property
    def about(self) -> str:
        """A text that describes the task and its options."""
        return f"task {self}: {self.tokenizer.vocab_size} different tokens"

    def identity(self) -> dict[str, Any]:
        """Return the task's name, options and a hash of its examples, as a JSON object."""
        # The hash comes from `content`.
        return {"task": self.name, "options": asdict(self), "content": self.content()}

    def content(self) -> str:
        """Return a hash (32 hex digits) of the vocabulary and of some examples."""
        found = hashlib.sha256(repr(self.tokenizer.words).encode())
        for length in (self.min_length, self.max_length):
            for number in range(16):
                found.update(self.row(np.random.default_rng(number), length).astype("<i8").data)
        return found.hexdigest()[:32]
