"""Measure how much distant context lowers the loss. There are four measures:

- windowed twin: compares the full context with a limited attention window in each layer.
- exact context: compares the full context with a context of exactly the training length.
- far-swap: compares the distant text with text of another document.
- receptive field: compares several context lengths.
"""

import numpy as np

from megatron.evaluation.suite.intervals import mean_of
from megatron.evaluation.suite.measure import Measure, Row, Sample, Subject

NATS = "nats per token"
SCORED = 2048
"""The least number of tokens that `exact_context` scores, if the text has so many."""
EFFECTS = {"gain": "helps", "loss": "harms", "none": "nothing", "unclear": "unclear"}
"""What far text does to the model, for each effect of `Estimate.effect`."""


def windowed_twin(sample: Sample, full_nT: np.ndarray, twin_nT: np.ndarray) -> Measure:
    """Measure how much lower the loss is with the full context than with a limited window.

    The windowed twin is the same model, but each layer sees only a window of the training length.
    Only targets with more context than the window are scored.

    Args:
        full_nT: The loss of each target with the full context, in nats [n sequences, T targets].
        twin_nT: The loss of each target with the window, in nats [n sequences, T targets].
    """
    title, name = "Gain over the windowed twin", "windowed_twin"
    if sample.longest <= sample.train_length:
        return Measure(name, title, NATS, sample.too_short, [])
    # Through several layers, the twin can still use tokens from beyond its window.
    gain_nT, first = twin_nT - full_nT, sample.train_length + 1
    spans = [(first, sample.longest + 1, "all"), *((*b, "doubling") for b in sample.bins(first))]
    rows = [
        Row(
            {"context": start, "bins": kind},
            mean_of(gain_nT[:, start - 1 : end - 1], sample.documents),
        )
        for start, end, kind in spans
    ]
    gain = rows[0].estimate
    answer = EFFECTS[gain.effect()]
    says = f"Attention beyond {sample.train_length:,} tokens lowers the loss by {gain} nats: "
    return Measure(name, title, NATS, f"{says}{answer}.", rows, answer)


def exact_context(subject: Subject, sample: Sample, full_nT: np.ndarray) -> Measure:
    """Measure how much lower the loss is with the full context than with exactly W tokens.

    W is the training length. Each token is scored twice: once with the full context, and once with
    exactly W tokens before it.

    Args:
        full_nT: The loss of each target with the full context, in nats [n sequences, T targets].
    """
    # The scored tokens stand at equal distances in each sequence, after more than W tokens.
    title, name = "Gain over exactly the training length", "exact_context"
    window = sample.train_length
    places = sample.longest - window
    if places < 1:
        return Measure(name, title, NATS, sample.too_short, [])
    wanted = max(SCORED, sample.tokens // window) // len(sample.documents)
    starts = np.unique(np.linspace(1, places, min(max(1, wanted), places)).astype(int))
    cut = np.stack([sample.sequences_nT[:, s : s + window + 1] for s in starts], 1)
    alone_nT = subject.losses(cut.reshape(-1, window + 1), last_only=True)
    gain_nT = alone_nT.reshape(len(full_nT), -1) - full_nT[:, starts + window - 1]
    gain = mean_of(gain_nT, sample.documents)
    answer = EFFECTS[gain.effect()]
    says = f"Text beyond {window:,} tokens lowers the loss by {gain} nats, against exactly "
    says += f"{window:,} tokens before each scored token: {answer}."
    also = {"scored": gain_nT.size, "loss": float(full_nT[:, starts + window - 1].mean())}
    return Measure(name, title, NATS, says, [Row({"context": window}, gain, also)], answer)


def far_swap(subject: Subject, sample: Sample, full_nT: np.ndarray) -> Measure:
    """Measure how the loss of the last tokens changes if distant text is swapped for other text.

    The other text is from another document.

    Args:
        full_nT: The loss of each target in the unchanged sequences, in nats
            [n sequences, T targets].
    """
    # The last `sample.tail` tokens of each sequence are scored. The W tokens before them are kept,
    # where W is the training length. All earlier text is replaced by text of another document.
    title, name = "Far-swap", "far_swap"
    far = sample.longest + 1 - sample.tail - sample.train_length
    if far < 1:
        return Measure(name, title, NATS, sample.too_short, [])
    swapped_nT = sample.sequences_nT.copy()
    swapped_nT[:, :far] = sample.sequences_nT[of_other_documents(sample.documents), :far]
    changed_nT = subject.losses(swapped_nT) - full_nT
    found = mean_of(changed_nT[:, -sample.tail :], sample.documents)
    answer = {"none": "no", "unclear": "unclear"}.get(found.effect(), "yes")
    effect = {"no": "its content does not matter", "yes": "its content matters"}
    says = (
        f"With another document's text beyond {sample.train_length:,} tokens, the loss of the last "
        f"{sample.tail} tokens changes by {found} nats: {effect.get(answer, 'no effect is seen')}."
    )
    return Measure(name, title, NATS, says, [Row({"kept": sample.train_length}, found)], answer)


def receptive_field(subject: Subject, sample: Sample, full_nT: np.ndarray) -> Measure:
    """Measure the loss of the last tokens of each sequence for several context lengths.

    The last row of the result is for the whole sequences.

    Args:
        full_nT: The loss of each target in the whole sequences, in nats [n sequences, T targets].
    """
    # For each context length c, short sequences are cut out of the text. A scored token has at
    # least c but fewer than 1.25 c tokens before it in its short sequence.
    losses: dict[int, np.ndarray] = {}
    context, full = 1, full_nT[:, -sample.tail :]
    while context < sample.longest - sample.tail:
        losses[context] = _after_context(subject, sample, context)
        context *= 2
    losses[sample.longest] = full
    best = min(losses, key=lambda context: losses[context].mean())
    rows = []
    for context, losses_nT in losses.items():
        gain = mean_of(losses_nT - losses[best], sample.documents, comparisons=len(losses))
        worse = "yes" if gain.effect() == "gain" else "no"
        also = {
            "more_than_best": gain.value,
            "more_low": gain.low,
            "more_high": gain.high,
            "worse": "unclear" if np.isnan(gain.low) else worse,
        }
        rows.append(Row({"context": context}, mean_of(losses_nT, sample.documents), also))
    field = field_of(rows)
    says = "How much context is used is unclear: there are too few documents."
    if isinstance(field, int):
        says = (
            f"The shortest context that is not clearly worse than the best (that with {best:,} "
            f"token{'s' * (best > 1)}) is {field:,} token{'s' * (field > 1)}."
        )
    return Measure("receptive_field", "Loss by context", NATS, says, rows, field)


def field_of(rows: list[Row]) -> int | str:
    """Return the receptive field: the shortest context with about the loss of the best context.

    The loss of this context is not significantly worse than the loss of the best context.
    The result is a number of tokens. Without intervals of the losses, the result is "unclear".

    Args:
        rows: The result for each context length.
    """
    # These are the rows of the measure `receptive_field`. A context is as good as the best one if
    # the difference of their losses is not surely positive. The result is "unclear" if there are no
    # intervals.
    if any(row.also["worse"] == "unclear" for row in rows):
        return "unclear"
    return next(row.at["context"] for row in rows if row.also["worse"] == "no")


def _after_context(subject: Subject, sample: Sample, context: int) -> np.ndarray:
    """Return the losses of the last `sample.tail` tokens of each sequence, [n, sample.tail].

    The model predicts each of these tokens from about `context` tokens.
    """
    tail, end = sample.tail, sample.longest + 1
    step = min(max(1, context // 4), tail)
    losses = np.empty((len(sample.sequences_nT), tail))
    starts = [*range(0, tail - step, step), tail - step]
    begins = [end - tail + start - context for start in starts]
    pieces = np.stack([sample.sequences_nT[:, b : b + context + step] for b in begins], 1)
    found = subject.losses(pieces.reshape(-1, context + step))[:, -step:]
    found = found.reshape(len(losses), len(starts), step)
    for number, start in enumerate(starts):
        losses[:, start : start + step] = found[:, number]
    return losses


def of_other_documents(documents: np.ndarray) -> np.ndarray:
    """For each sequence, return the index of a sequence from another document, [n].

    Args:
        documents: The document of each sequence, [n], in ascending order. There must be at least
            two documents.
    """
    count = len(documents)
    later = np.searchsorted(documents, documents, side="right")
    offset = np.arange(count) - np.searchsorted(documents, documents)
    other = (later + offset) % count
    return np.where(documents[other] == documents, later % count, other)
