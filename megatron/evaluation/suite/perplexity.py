"""Measure the loss by length and by position, and on the tokens that gain from long context."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from megatron.evaluation.suite.intervals import estimate, mean_of
from megatron.evaluation.suite.measure import Measure, Row, Sample, Subject
from megatron.readable_numbers import told_apart

KEY_GAIN = 2.0
"""A key token's loss falls by more nats than this through the long context (2410.23771)."""
KEY_LOSS = 2.0
"""A key token's loss with the long context is below this many nats."""


def by_length(
    subject: Subject,
    sample: Sample,
    full_nT: np.ndarray,
    token_bytes: Callable[[np.ndarray], np.ndarray],
) -> Measure:
    """Measure perplexity and bits per byte at each length, on the same text.

    Each sequence is cut into pieces of that length. A remainder at the sequence's start is not
    measured.

    Args:
        full_nT: The losses of all targets, each with its whole sequence as context.
    """
    rows = []
    for length in sample.lengths:
        pieces = sample.longest // length
        start = sample.longest - pieces * length
        inputs = sample.sequences_nT[:, start:]
        cut = np.stack([inputs[:, i * length : (i + 1) * length + 1] for i in range(pieces)], 1)
        losses_nT = full_nT
        if length < sample.longest:
            flat = subject.losses(cut.reshape(-1, length + 1))
            losses_nT = flat.reshape(len(cut), -1)
        found = mean_of(losses_nT, sample.documents)
        counted = token_bytes(inputs[:, 1:]).sum(1)
        bits = estimate(losses_nT.sum(1) / math.log(2), counted, sample.documents)
        also = {"loss": found.value, "bits_per_byte": bits.value}
        also |= {"bits_low": bits.low, "bits_high": bits.high}
        rows.append(Row({"length": length}, found.perplexity, also))
    best = min(rows, key=lambda row: row.estimate.value)
    worst = max(rows, key=lambda row: row.estimate.value)
    shown = told_apart(*(row.estimate.value for row in (rows[0], rows[-1], best, worst)))
    says = (
        f"Perplexity is {shown[0]} at {rows[0].at['length']:,} tokens and {shown[1]} at "
        f"{sample.longest:,}; it is lowest at {best.at['length']:,}."
    )
    if len(set(shown)) == 1:
        says = f"Perplexity is {shown[0]} at every length."
    return Measure("by_length", "Perplexity by length", "perplexity", says, rows)


def by_position(sample: Sample, full_nT: np.ndarray) -> Measure:
    """Measure the loss by context: targets with about as many tokens before them form a group.

    Args:
        full_nT: The losses of all targets, each with its whole sequence as context.
    """
    rows = [
        Row({"context": start}, mean_of(full_nT[:, start - 1 : end - 1], sample.documents))
        for start, end in sample.bins(1)
    ]
    first, last = told_apart(rows[0].estimate.value, rows[-1].estimate.value)
    then = "the same" if first == last else last
    says = f"The loss is {first} nats after one token and {then} after "
    says += f"{rows[-1].at['context']:,} or more."
    return Measure("by_position", "Loss by position", "nats per token", says, rows)


def key_tokens(
    sample: Sample, full_nT: np.ndarray, twin_nT: np.ndarray, gain_nT: np.ndarray, judge: str
) -> Measure:
    """Measure the loss on key tokens, those whose prediction gains from long context.

    The judge is the model that chooses the key tokens. A token is a key token on two conditions
    (LongPPL, arXiv 2410.23771). The judge's loss falls by more than `KEY_GAIN` if the judge sees
    the full context instead of a window of the training length. And its loss with the full context
    is below `KEY_LOSS`. Only tokens with more context than the training length can be key tokens.

    Args:
        full_nT, twin_nT: The losses of the model and of its windowed twin.
        gain_nT: The amount by which the judge's loss of each token falls; -inf where the loss with
            the full context is above `KEY_LOSS`.
        judge: A text for the report that names the judge.
    """
    name, title, unit = "key_tokens", "Key-token perplexity", "perplexity"
    if sample.longest <= sample.train_length:
        return Measure(name, title, unit, sample.too_short, [])
    far = slice(sample.train_length, None)
    is_key = gain_nT[:, far] > KEY_GAIN
    rows, counts = [], is_key.sum(1)
    for model, losses_nT in (("full", full_nT), ("windowed twin", twin_nT)):
        totals = (losses_nT[:, far] * is_key).sum(1)
        found = estimate(totals, counts, sample.documents)
        also = {"tokens": int(counts.sum()), "share": float(is_key.mean())}
        rows.append(Row({"model": model}, found.perplexity, also))
    says = f"No token gains more than {KEY_GAIN:g} nats from context beyond the training length"
    if counts.sum():
        full, twin = told_apart(*(row.estimate.value for row in rows))
        says = (
            f"{int(counts.sum()):,} key tokens (a part of {is_key.mean():.2g}): their perplexity "
            f"is {full}, and {twin} within the window"
        )
    says += f" (the judge is {judge})."
    return Measure(name, title, unit, says, rows)


def judged_gain(full_nT: np.ndarray, twin_nT: np.ndarray) -> np.ndarray:
    """Return `gain_nT` for `key_tokens`, from the losses of the judge and of its windowed twin."""
    return np.where(full_nT < KEY_LOSS, twin_nT - full_nT, -np.inf)
