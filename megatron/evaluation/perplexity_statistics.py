"""Compute perplexity, bits per byte and standard errors from the losses of sequences of one length.

For n sequences of one length, where sequence i has the mean loss l_i (nats per target token):

    loss = mean(l_i)     stderr = std(l_i, ddof=1) / sqrt(n)     perplexity = exp(loss)
    bits_per_byte = loss / ln 2 * (target tokens / UTF-8 bytes of these tokens)

The standard errors of perplexity and bits_per_byte are first-order approximations. The first is
perplexity * stderr, and the second is bits_per_byte * stderr / loss.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.config import Config
from megatron.parallel.loss import perplexity
from megatron.version import fingerprint

TokenBytes = Callable[[np.ndarray], np.ndarray]
"""A function from token ids to the number of UTF-8 bytes of each token."""


@dataclass(frozen=True)
class LengthResult:
    """The result for one sequence length: a row of `extrapolation.csv`.

    The fields, in this order, are the first columns of the file. `measured_with` has the others.
    """

    length: int  # the target tokens in a sequence
    sequences: int
    loss: float  # nats per target token
    perplexity: float
    bits_per_byte: float
    stderr: float  # the standard error of `loss` over sequences; NaN for a single sequence

    @property
    def perplexity_stderr(self) -> float:
        return self.perplexity * self.stderr

    @property
    def bits_per_byte_stderr(self) -> float:
        return self.bits_per_byte * self.stderr / self.loss if self.loss else 0.0


def measured_with(config: Config, step: int) -> dict[str, Any]:
    """Return facts about a measurement, as a dict from column name in a CSV file to value.

    The facts are the distance scale, the split, `step`, and a fingerprint of the code.

    Args:
        step: The number of optimizer steps that the model was trained for.
    """
    scale, split = config.evaluation.eval_distance_scale, config.evaluation.eval_split
    return {"distance_scale": scale, "split": split, "step": step, "code": fingerprint()}


def scaled(title: str, config: Config) -> str:
    """Return `title`, extended by `eval_distance_scale` if that is not 1."""
    scale = config.evaluation.eval_distance_scale
    return title if scale == 1.0 else f"{title} at distances x {scale:g}"


def summarise(length: int, losses: np.ndarray, bytes_scored: np.ndarray) -> LengthResult:
    """Return the statistics of sequences of `length` tokens.

    Args:
        losses: The mean loss of each of n sequences in nats, float64 [n].
        bytes_scored: The number of UTF-8 bytes of each target token, in any shape.
    """
    loss = float(losses.mean())
    stderr = float(losses.std(ddof=1) / math.sqrt(len(losses))) if len(losses) > 1 else math.nan
    return LengthResult(
        length=length,
        sequences=len(losses),
        loss=loss,
        perplexity=perplexity(loss),
        bits_per_byte=loss * bytes_scored.size / (math.log(2) * int(bytes_scored.sum())),
        stderr=stderr,
    )
