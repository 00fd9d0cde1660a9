"""Compute perplexity, bits per byte and standard errors from the losses of sequences of one length.

For n sequences of one length, sequence i has the mean loss l_i (nats per target token):

    loss = mean(l_i)     stderr = std(l_i, ddof=1) / sqrt(n)     perplexity = exp(loss)
    bits_per_byte = loss / ln 2 * (target tokens / UTF-8 bytes of these tokens)

The standard errors of perplexity and bits_per_byte are first-order approximations. The standard
error of perplexity is perplexity * stderr. The standard error of bits_per_byte is bits_per_byte *
stderr / loss.
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
    """The result for one sequence length: the first columns of a row of `extrapolation.csv`.

    The columns have the names and the order of the fields.
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


def measured_with(config: Config, step: int, *sizes: str) -> dict[str, Any]:
    """Return the settings with which a model is measured, as a dict from CSV column to value.

    The settings are the distance scale, the split, `step`, a fingerprint of the code, and `sizes`.

    Args:
        config: The config.
        step: The number of optimizer steps that the model was trained for.
        sizes: The keys of the config that say how much is measured.
    """
    scale, split = config.evaluation.eval_distance_scale, config.evaluation.eval_split
    about = {"distance_scale": scale, "split": split, "step": step, "code": fingerprint()}
    return about | {key: getattr(config.evaluation, key) for key in sizes}


def scaled(title: str, config: Config) -> str:
    """Return `title`, with the config's `eval_distance_scale` appended unless the scale is 1."""
    scale = config.evaluation.eval_distance_scale
    return title if scale == 1.0 else f"{title} at distances x {scale:g}"


def summarise(length: int, losses: np.ndarray, bytes_scored: np.ndarray) -> LengthResult:
    """Summarise the losses of sequences of one length as a `LengthResult`.

    Args:
        length: The number of target tokens in a sequence.
        losses: The mean loss of each of n sequences in nats per token, float64 [n].
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
