"""Measure whether the model finds earlier tokens again: repeated tokens, copies and passkeys.

Nothing is generated. The model reads the right answers, and their losses are compared with the
losses in a control, where the earlier context does not contain the answer. So the measures work for
every vocabulary, and show a small gain long before a model would write the whole answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron.data.tokenizers.base import Tokenizer
from megatron.evaluation.suite.intervals import estimate, mean_of
from megatron.evaluation.suite.measure import Measure, Row, Sample, Subject
from megatron.readable_numbers import told_apart

DEPTHS = (0.0, 0.5, 0.9)
"""The places where a needle is hidden, as the fraction of the text that comes before the needle."""
NATS = "nats per token"
NOTICEABLE = 0.05
"""The smallest gain, in nats per token, that the report's sentences call a gain."""


@dataclass(frozen=True)
class Needle:
    """Tokens that are hidden in a text: the cue, the answer and the end, in this order.

    The text ends with the cue and the answer again, and the loss of this last answer is measured.
    """

    cue: np.ndarray
    answer: np.ndarray
    end: np.ndarray


DrawNeedle = Callable[[np.random.Generator, np.ndarray | None], Needle]
"""A function that draws a random needle. Its second argument is the cue to use, or None for a
random cue. A function whose needles all have the same cue ignores this argument."""


def induction(subject: Subject, sample: Sample) -> Measure:
    """Measure how much better d random tokens are predicted when they occur for the second time.

    Each text consists of the d tokens, twice. In the control text, other random tokens replace the
    first copy. The gain is the loss of the second copy in the control text minus its loss in the
    text. The first token of the second copy is not scored.
    """
    rng, rows, distance = np.random.default_rng(1), [], 8
    while 2 * distance <= sample.longest:
        count = min(64, max(8, sample.tokens // (4 * distance)))
        once, other = (sample.random(rng, (count, distance)) for _ in range(2))
        twice_nT = subject.losses(np.concatenate((once, once), 1))
        control_nT = subject.losses(np.concatenate((other, once), 1))[:, distance:]
        second_nT, first_nT = twice_nT[:, distance:], twice_nT[:, : distance - 1]
        also = {"second_minus_first": float((second_nT - first_nT).mean())}
        gain = mean_of(control_nT - second_nT, np.arange(count))
        rows.append(Row({"distance": distance}, gain, also))
        distance *= 2
    found = [row for row in rows if _noticeable(row)]
    says = "Random tokens are not predicted better when they occur for the second time."
    if found:
        best = max(found, key=lambda row: row.estimate.value)
        says = (
            f"Repeated random tokens are predicted better up to a distance of "
            f"{found[-1].at['distance']:,}, most at {best.at['distance']:,}: by "
            f"{best.estimate.value:.3f} nats."
        )
    return Measure("induction", "Induction", f"gain, {NATS}", says, rows)


def _noticeable(row: Row) -> bool:
    return row.estimate.low > 0 and row.estimate.value >= NOTICEABLE


def copying(subject: Subject, sample: Sample) -> Measure:
    """Measure whether the model copies 16 random tokens after a cue of 8 random tokens."""

    def needle(rng: np.random.Generator, cue: np.ndarray | None) -> Needle:
        tokens = sample.random(rng, (1, 24))[0]
        return Needle(tokens[:8] if cue is None else cue, tokens[8:], tokens[:0])

    return _retrieval(subject, sample, "copy", "Copy of random tokens", needle)


def passkey(subject: Subject, sample: Sample, tokenizer: Tokenizer) -> Measure:
    """Measure whether the model knows, at the end of a text, five digits that the text contains."""
    cue, end = (tokenizer.encode(text) for text in ("\nThe pass key is", ". Remember it.\n"))

    def needle(rng: np.random.Generator, _: np.ndarray | None) -> Needle:
        answer = tokenizer.encode(f" {rng.integers(10_000, 100_000)}")
        return Needle(*(np.asarray(part, np.int64) for part in (cue, answer, end)))

    return _retrieval(subject, sample, "passkey", "Passkey", needle)


def _retrieval(
    subject: Subject, sample: Sample, name: str, title: str, draw: DrawNeedle
) -> Measure:
    """Hide a needle in texts, and measure how much the needle lowers the loss of its answer.

    A needle is a cue with an answer. Each text ends with the cue and the answer again, and only
    this last answer is scored. The control text hides a needle with the same cue and another
    answer. The gain is the loss in the control text minus the loss in the text.
    """
    middle = sample.lengths[len(sample.lengths) // 2]
    rows = []
    for length in dict.fromkeys((sample.lengths[0], middle, sample.longest)):
        for depth in DEPTHS:
            row = _cell(subject, sample, length, depth, draw)
            rows += [row] if row else []
    found = [row for row in rows if _noticeable(row)]
    says = f"{title}: no answer is predicted better because it occurs in the text."
    if found:
        longest, best = found[-1].at["length"], max(found, key=lambda row: row.estimate.value)
        before, after = told_apart(best.also["control_probability"], best.also["probability"])
        says = (
            f"{title}: the answer in the text helps in {len(found)} of {len(rows)} cells, up to "
            f"length {longest:,}; most at length {best.at['length']:,} and depth "
            f"{best.at['depth']:g}, by {best.estimate.value:.3f} nats (the probability of a token "
            f"goes from {before} to {after})."
        )
    return Measure(name, title, f"gain, {NATS}", says, rows)


def _cell(
    subject: Subject, sample: Sample, length: int, depth: float, draw: DrawNeedle
) -> Row | None:
    """Return the gain for texts of `length` tokens with the needle at `depth` (see `_retrieval`).

    Return None if the inserted tokens would fill more than half of a text.
    """
    rng, count = np.random.default_rng(2), max(8, sample.tokens // (4 * length))
    spread = np.unique(np.linspace(0, len(sample.documents) - 1, count).astype(int))
    texts, documents = sample.sequences_nT[spread, : length + 1], sample.documents[spread]
    present, control, answers = [], [], []
    for text in texts:
        hidden = draw(rng, None)
        other = draw(rng, hidden.cue)
        question = np.concatenate((hidden.cue, hidden.answer))
        if 2 * (len(question) + max(map(_size, (hidden, other)))) > length:
            return None
        present.append(_with_needle(text, hidden, depth, question))
        control.append(_with_needle(text, other, depth, question))
        answers.append(len(hidden.answer))
    losses, without = (
        np.array([row[-n:].mean() for row, n in zip(found, answers, strict=True)])
        for found in (subject.losses(np.stack(each)) for each in (present, control))
    )
    gain = estimate(without - losses, np.ones(len(texts)), documents)
    return Row(
        {"length": length, "depth": depth},
        gain,
        {
            "probability": float(np.exp(-losses).mean()),
            "control_probability": float(np.exp(-without).mean()),
        },
    )


def _size(needle: Needle) -> int:
    return len(needle.cue) + len(needle.answer) + len(needle.end)


def _with_needle(
    text: np.ndarray, needle: Needle, depth: float, question: np.ndarray
) -> np.ndarray:
    """Return the text with the needle inserted and the question at the end.

    The last tokens of `text` are left out, so that the result is as long as `text`.

    Args:
        depth: The place of the needle: 0 is the start of the text, 1 is just before the question.
    """
    room = len(text) - _size(needle) - len(question)
    split = round(depth * room)
    parts = (text[:split], needle.cue, needle.answer, needle.end, text[split:room], question)
    return np.concatenate(parts)
