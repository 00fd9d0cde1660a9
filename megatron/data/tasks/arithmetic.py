"""Tasks of arithmetic: `parity`, `modular` and `addition`.

Deletang et al. (2022, arXiv 2207.02098) use these tasks to study length generalization. They
classify parity and modular arithmetic as regular, and addition as context-sensitive.
"""

from dataclasses import dataclass

import numpy as np

from megatron.data.tasks.base import ASKED, Example, Task, numbers, option, question


@dataclass(frozen=True)
class Parity(Task):
    """The task of computing the parity of n bits, which is the number of ones modulo 2.

    Attributes:
        steps: Whether the answer has n tokens, where token i is the parity of the first i bits. If
            false, the answer is the parity of all bits.
    """

    name = "parity"
    steps: bool = option(False)

    @property
    def words(self) -> tuple[str, ...]:
        return (ASKED, "0", "1")

    def example(self, rng: np.random.Generator, length: int) -> Example:
        bits = rng.integers(2, size=length)
        answer = (bits.cumsum() % 2).astype(str).tolist()
        return question(bits.astype(str).tolist(), answer if self.steps else answer[-1:])


@dataclass(frozen=True)
class Modular(Task):
    """The task of computing an expression of n numbers with `+`, `-` and `*`, modulo `modulus`.

    The operations are done from left to right, without precedence.

    Attributes:
        modulus: The modulus.
        steps: Whether the answer has n tokens, where token i is the value of the expression up to
            number i. If false, the answer is the value of the whole expression.
    """

    name = "modular"
    modulus: int = option(5, least=2)
    steps: bool = option(False)

    @property
    def words(self) -> tuple[str, ...]:
        return (ASKED, "+", "-", "*", *numbers(self.modulus))

    def example(self, rng: np.random.Generator, length: int) -> Example:
        values = rng.integers(self.modulus, size=length).tolist()
        signs = ["+", *("+-*"[i] for i in rng.integers(3, size=length - 1))]
        found, asked, answer = 0, [], []
        for sign, value in zip(signs, values, strict=True):
            by_sign = {"+": found + value, "-": found - value, "*": found * value}
            found = by_sign[sign] % self.modulus
            asked += [sign, str(value)]
            answer.append(str(found))
        return question(asked[1:], answer if self.steps else answer[-1:])


@dataclass(frozen=True)
class Addition(Task):
    """The task of adding two numbers of n digits. The answer is the sum, written with n + 1 digits.

    Attributes:
        reverse: Whether all three numbers are written with the last digit first.
    """

    # The reverse order is easier, because the carries then run in the direction of writing.

    name = "addition"
    base: int = option(10, least=2)
    reverse: bool = option(False)

    @property
    def words(self) -> tuple[str, ...]:
        return (ASKED, "+", *numbers(self.base))

    def example(self, rng: np.random.Generator, length: int) -> Example:
        first, second = rng.integers(self.base, size=(2, length)).tolist()  # last digit first
        carry, total = 0, []
        for a, b in zip(first, second, strict=True):
            carry, digit = divmod(a + b + carry, self.base)
            total.append(digit)
        step = 1 if self.reverse else -1
        x, y, z = (list(map(str, each))[::step] for each in (first, second, [*total, carry]))
        return question([*x, "+", *y], z)
