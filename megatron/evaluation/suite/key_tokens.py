"""Measure the loss on key tokens: the tokens whose prediction gains from long context (LongPPL)."""

import numpy as np

from megatron.evaluation.suite.intervals import estimate
from megatron.evaluation.suite.measure import Measure, Row, Sample
from megatron.readable_numbers import told_apart

KEY_GAIN = 2.0
"""A key token's loss falls by more nats than this through long context (arXiv 2410.23771)."""
KEY_LOSS = 2.0
"""A key token's loss with the long context is below this many nats."""


def key_tokens(
    sample: Sample, full_nT: np.ndarray, twin_nT: np.ndarray, gain_nT: np.ndarray, judge: str
) -> Measure:
    """Measure the perplexity of key tokens: the tokens that long context makes easier to predict.

    A model, called the judge, chooses the key tokens. The judge may be the measured model. Source:
    LongPPL, arXiv 2410.23771.

    Args:
        full_nT: The measured model's losses with the full context, in nats [n, T]: n sequences with
            T targets each.
        twin_nT: The measured model's losses with a window of the training length in each layer, in
            nats [n, T].
        gain_nT: The judge's `judged_gain`, in nats [n, T].
        judge: The name of the judge in the report.
    """
    # A token is a key token if its `gain_nT` (see `judged_gain`) is above `KEY_GAIN`. Only tokens
    # with more context than the training length can be key tokens.
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
    says = f"No token with a loss below {KEY_LOSS:g} nats gains over {KEY_GAIN:g} from far text"
    if counts.sum():
        full, twin = told_apart(*(row.estimate.value for row in rows))
        says = (
            f"{int(counts.sum()):,} key tokens (a part of {is_key.mean():.2g}): their perplexity "
            f"is {full}, and {twin} within the window"
        )
    says += f" (the judge is {judge})."
    return Measure(name, title, unit, says, rows)


def judged_gain(full_nT: np.ndarray, twin_nT: np.ndarray) -> np.ndarray:
    """Return the judge's gain: how much the full context lowers its loss of each token, [n, T].

    The gain is -inf where the loss with the full context is at least `KEY_LOSS`.

    Args:
        full_nT: The judge's losses with the full context, in nats [n, T].
        twin_nT: The judge's losses with a window of the training length in each layer, [n, T].
    """
    # The result is -inf for a token whose loss with the full context is at least `KEY_LOSS`.
    return np.where(full_nT < KEY_LOSS, twin_nT - full_nT, -np.inf)
