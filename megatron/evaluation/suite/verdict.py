"""Say in a few sentences what the measures mean together."""

from __future__ import annotations

from megatron.evaluation.suite.context import MARGIN, field_of
from megatron.evaluation.suite.measure import Measure
from megatron.readable_numbers import told_apart


def verdict(measures: list[Measure]) -> list[str]:
    """Return sentences that sum up the measures of one model.

    The first sentence says how much context the model uses. This is the shortest context with
    loss <= (1 + MARGIN) * lowest loss.
    """
    found = {measure.name: measure for measure in measures}
    rows = found["receptive_field"].rows
    longest = rows[-1].at["context"]
    field, best = field_of(rows)
    within = f"{MARGIN:.0%} of the loss"
    if field == 1:
        lines = [f"No context is used: all tokens but the last are worth less than {within}."]
    elif field == longest:
        lines = [f"The context is used up to {longest:,} tokens, the longest measured."]
    else:
        lines = [f"No context beyond {field:,} tokens is used: it is worth less than {within}."]
    gain = next(row.also for row in rows if row.at["context"] == best)
    harm = -gain["more_than_full"]
    if harm > MARGIN * rows[-1].estimate.value and gain["more_high"] < 0:
        text = f"Context beyond {best:,} tokens does harm: with {longest:,}, the loss is "
        lines.append(f"{text}{told_apart(harm)[0]} nats higher.")
    swap = found["far_swap"].rows
    if swap and swap[0].estimate.excludes_zero and field <= swap[0].at["kept"]:
        lines.append(f"Small, but not nothing: {found['far_swap'].says}")
    lines += [found[name].says for name in ("induction", "copy", "passkey") if found[name].rows]
    return lines
