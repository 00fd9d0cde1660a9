"""Measure the perplexity by sequence length, and the loss by position."""

import math

import numpy as np

from megatron.evaluation.perplexity_statistics import TokenBytes
from megatron.evaluation.suite.intervals import estimate, mean_of
from megatron.evaluation.suite.measure import Measure, Row, Sample, Subject
from megatron.readable_numbers import told_apart


def by_length(
    subject: Subject, sample: Sample, full_nT: np.ndarray, token_bytes: TokenBytes
) -> Measure:
    """Measure perplexity and bits per byte by sequence length.

    For each length, every sequence is cut into pieces of this length. The text is the same for each
    length that divides the longest.

    Args:
        full_nT: The loss of each target with all earlier tokens of its sequence as context, in nats
            [n sequences, T targets].
        token_bytes: A function from token ids to the number of UTF-8 bytes of each token.
    """
    # A remainder at the start of a sequence is not measured.
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
        counted = token_bytes(inputs)[:, 1:].sum(1)
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
    if rest := max(sample.longest % length for length in sample.lengths):
        says += f" Lengths that do not divide {sample.longest:,} leave out up to {rest:,} tokens "
        says += "at the start of each sequence."
    return Measure("by_length", "Perplexity by length", "perplexity", says, rows)


def by_position(sample: Sample, full_nT: np.ndarray) -> Measure:
    """Measure the loss by position, the number of tokens before a target.

    Args:
        full_nT: The loss of each target with all earlier tokens of its sequence as context, in nats
            [n sequences, T targets].
    """
    # The loss is averaged over the targets in each bin of context lengths (see `Sample.bins`).
    rows = [
        Row({"context": start}, mean_of(full_nT[:, start - 1 : end - 1], sample.documents))
        for start, end in sample.bins(1)
    ]
    first, last = told_apart(rows[0].estimate.value, rows[-1].estimate.value)
    then = "the same" if first == last else last
    says = f"The loss is {first} nats after one token and {then} after "
    says += f"{rows[-1].at['context']:,} or more."
    return Measure("by_position", "Loss by position", "nats per token", says, rows)
