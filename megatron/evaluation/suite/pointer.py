"""Measure how far copying from earlier text can lower the loss, with an exact-match pointer.

The pointer reads the last n tokens (n = 2, 3, 5), and finds where the same n tokens occur earlier
in the sequence. It predicts the tokens that followed there, in proportion to their counts. The
pointer's prediction is mixed with the prediction of a model:

    p(x) = w_0 p_model(x) + sum_n w_n count_n(x) / count_n

Here count_n is the number of earlier matches of the last n tokens, and count_n(x) is the number of
matches after which token x followed. The weights w depend on the largest n that has a match. To fit
the weights on other documents than the scored document, the documents are divided into `FOLDS`
parts. Each part is scored with weights that are fitted on the other parts by expectation
maximisation. Documents that repeat each other count as one document (`read_sample`), so that the
weights are never fitted on a copy of the scored text.
"""

import numpy as np

from megatron.evaluation.suite.intervals import Estimate, estimate, mean_of
from megatron.evaluation.suite.measure import Measure, Row, Sample

ORDERS = (2, 3, 5)
FOLDS = 5
STEPS = 60
"""The steps of expectation maximisation."""


def pointer(sample: Sample, full_nT: np.ndarray, twin_nT: np.ndarray) -> Measure:
    """Measure how much a pointer that copies earlier text lowers the loss, for near and far text.

    Near text is the last W tokens before a target, where W is the training length. Far text is all
    earlier text. Only targets with more than W tokens before them are scored.

    Args:
        full_nT: The loss of each target with the full context, in nats [n sequences, T targets].
        twin_nT: The loss of each target when each layer sees only W tokens, [n, T].
    """
    # The windowed twin is the same model, but each of its layers sees only W tokens. The gain of a
    # pointer is the twin's loss minus the loss of the twin mixed with the pointer. The result has
    # one row for near text and one for far text:
    # - near: the gain of a pointer that copies near text
    # - far: the gain of a pointer that copies all text, minus the gain for near text
    # - The column `left` is the same value with the model in place of its twin. The far row has
    #   more columns. `alone` is the gain of a pointer that copies only far text. `taken` is the
    #   twin's loss minus the model's loss. If the far gain is surely above 0, `share` is `taken`
    #   divided by it.
    name, title, unit = "pointer", "What the text offers", "nats per token"
    window = sample.train_length
    if sample.longest <= window:
        return Measure(name, title, unit, sample.too_short, [])
    groups, found = sample.documents, predictions(sample.sequences_nT, window)
    gain, rest = (
        {where: gains(each[:, window:], losses_nT[:, window:], groups)
         for where, each in found.items()}
        for losses_nT in (twin_nT, full_nT)
    )  # fmt: skip
    taken_nT = (twin_nT - full_nT)[:, window:]
    offered, near, left, near_left, alone, taken = (
        mean_of(each, groups)
        for each in (gain["all"] - gain["near"], gain["near"], rest["all"] - rest["near"],
                     rest["near"], gain["far"], taken_nT)
    )  # fmt: skip
    also = _columns("left", left) | _columns("alone", alone) | _columns("taken", taken)
    says = f"Beyond {window:,} tokens, the text offers a pointer {offered} nats; the model takes "
    says += f"{taken} nats"
    if offered.low > 0:
        totals = taken_nT.sum(1), (gain["all"] - gain["near"]).sum(1)
        share = estimate(*totals, groups)
        also |= _columns("share", share)
        says += f", {share.value:.0%} [{share.low:.0%}, {share.high:.0%}] of it"
    rows = [
        Row({"matches": f"beyond {window}"}, offered, also),
        Row({"matches": f"within {window}"}, near, _columns("left", near_left)),
    ]
    return Measure(name, title, unit, f"{says}.", rows)


def _columns(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def predictions(sequences_nT: np.ndarray, window: int) -> dict[str, np.ndarray]:
    """Return the probability with which copying from the context predicts each target.

    A pointer of order k looks for earlier copies of the last k tokens, and predicts the tokens that
    followed those copies. Without such a copy, the probability is -1.

    Args:
        sequences_nT: The tokens of n sequences, int64 [n, T].
        window: The number of tokens before a target that are near. All earlier tokens are far.

    Returns:
        A dict from "all", "near" and "far" to arrays [n, T - 1, orders], with the orders of
        `ORDERS`. The pointers of "all" copy from all earlier tokens, the pointers of "near" only
        from near tokens, and the pointers of "far" only from far tokens.
    """
    grams, found = _gram_ids(sequences_nT, max(ORDERS) + 1), {"all": [], "near": [], "far": []}
    for order in ORDERS:
        # A match ends one token before the token that is copied.
        every, far = (
            (_earlier(grams[order], beyond)[:, :-1], _earlier(grams[order + 1], beyond)[:, 1:])
            for beyond in (0, window)
        )
        near = every[0] - far[0], every[1] - far[1]
        for (matches, hits), kept in zip((every, near, far), found.values(), strict=True):
            kept.append(np.where(matches > 0, hits / np.maximum(matches, 1), -1.0))
    return {name: np.stack(kept, -1) for name, kept in found.items()}


def _gram_ids(sequences_nT: np.ndarray, longest: int) -> dict[int, np.ndarray]:
    """Return a dict from k to the ids [n, T] of the last k tokens at each position.

    The dict contains each k from 1 to `longest`. Equal tokens in the same sequence have equal ids.
    """
    # Two ids are equal if their tokens are equal and in the same sequence. At a position with fewer
    # than k tokens, the id differs from all others.
    row_n1 = np.arange(len(sequences_nT))[:, None]
    tokens_nT = np.unique(sequences_nT, return_inverse=True)[1].reshape(sequences_nT.shape)
    ids, size = {1: row_n1 * (tokens_nT.max() + 1) + tokens_nT}, tokens_nT.max() + 1
    for order in range(1, longest):
        before = np.concatenate((ids[order].max() + 1 + row_n1, ids[order][:, :-1]), 1)
        pairs = before * size + tokens_nT
        ids[order + 1] = np.unique(pairs, return_inverse=True)[1].reshape(pairs.shape)
    return ids


def _earlier(ids_nT: np.ndarray, beyond: int) -> np.ndarray:
    """Return how often the id of each position occurs at earlier positions, [n, T].

    Only positions more than `beyond` positions earlier count.
    """
    positions = np.arange(ids_nT.shape[1])
    start_nT = ids_nT * len(positions)
    keys = np.sort((start_nT + positions).ravel())
    ends = np.searchsorted(keys, start_nT + np.maximum(positions - beyond, 0))
    return ends - np.searchsorted(keys, start_nT)


def gains(found_nTO: np.ndarray, losses_nT: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return how much each loss falls if pointers are mixed with the model, in nats [n, T].

    A pointer predicts a copy of earlier text.

    Args:
        found_nTO: The probability that each of O pointers assigns to each target, [n, T, O]. It is
            -1 where a pointer finds no match. Each pointer matches another number of tokens.
        losses_nT: The model's loss of each target, in nats [n, T].
        groups: The document of each sequence, [n].
    """
    # `found_nTO` is an entry of `predictions`. The documents are divided into `FOLDS` parts. The
    # weights of the mixture for one part are fitted to the documents of the other parts.
    states_nT = (found_nTO >= 0).sum(-1)  # an order has matches if a higher order has matches
    # Probabilities are divided by the model's, so that large losses do not underflow.
    ratios = np.maximum(found_nTO, 0) * np.exp(np.minimum(losses_nT, 300))[..., None]
    ratios = np.concatenate((np.ones((*losses_nT.shape, 1)), ratios), -1)
    gained_nT = np.zeros(losses_nT.shape)
    part_n = np.unique(groups, return_inverse=True)[1] % FOLDS
    for part in np.unique(part_n):
        for state in range(1, len(ORDERS) + 1):
            taught = ratios[part_n != part][states_nT[part_n != part] == state]
            scored = (part_n == part)[:, None] & (states_nT == state)
            gained_nT[scored] = np.log(ratios[scored] @ _weights(taught))
    return gained_nT


def _weights(ratios: np.ndarray) -> np.ndarray:
    """Return the weights of the predictors in the best mixture, [1 + orders].

    The predictors are the model and one pointer of each order.

    Args:
        ratios: The probability that each predictor assigns to each token, divided by the
            probability that the model assigns to this token, [tokens, 1 + orders].
    """
    hits = ratios[ratios[:, 1:].any(1)]  # the other tokens belong to the model
    weights = np.full(ratios.shape[1], 1 / ratios.shape[1])
    for _ in range(STEPS):
        shares = (hits * weights / (hits @ weights)[:, None]).sum(0)
        shares[0] += len(ratios) - len(hits) + 1  # one more, so that the model keeps a weight
        weights = shares / shares.sum()
    return weights
