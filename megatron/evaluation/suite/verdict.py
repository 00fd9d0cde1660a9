"""Summarise in a few sentences what the measures show together."""

from megatron.evaluation.suite.intervals import FEWEST
from megatron.evaluation.suite.measure import Measure
from megatron.readable_numbers import told_apart


def verdict(measures: list[Measure]) -> list[str]:
    """Return the verdict: sentences that summarise the measures of one model.

    The first sentence tells how much context the model uses.
    """
    # Then come sentences about far text and about each measure. With fewer than `FEWEST` documents,
    # the only sentence says that there is no verdict.
    found = {measure.name: measure for measure in measures}
    field, rows = found["receptive_field"].answer, found["receptive_field"].rows
    if field == "unclear":
        documents = rows[-1].estimate.documents
        return [f"No verdict: {documents} documents were read, and intervals need {FEWEST}."]
    longest, seen = rows[-1].at["context"], "no longer context clearly helps the last tokens"
    lines = [f"The context is used up to {field:,} tokens: {seen}."]
    if field == 1:
        lines = [f"No use of context beyond the last token is seen: {seen}."]
    if field == longest:
        lines = [f"The context is used up to {longest:,} tokens, the longest measured."]
    harm = rows[-1].also
    if harm["worse"] == "yes":
        best = min(rows, key=lambda row: row.estimate.value).at["context"]
        nats = told_apart(harm["more_than_best"])[0]
        text = f"Context beyond {best:,} tokens harms: with {longest:,}, the loss is "
        lines.append(f"{text}{nats} nats higher.")
    if found["windowed_twin"].rows:
        lines.append(f"Far text: {far_text(found)}.")
        names = ("exact_context", "windowed_twin", "far_swap", "pointer")
        lines += [found[name].says for name in names if found[name].rows]
    lines += [found[name].says for name in ("induction", "copy", "passkey", "ruler", "heads")
              if name in found and found[name].rows]  # fmt: skip
    return lines


def far_text(found: dict[str, Measure]) -> str:
    """Return the effect of text beyond the training length: whether it helps or harms the model.

    The result is "helps", "harms", "nothing" or "unclear".

    Args:
        found: Maps the name of each measure to the measure.
    """
    # The answer is that of the measure `exact_context`. If the measure `windowed_twin` has the
    # opposite answer, return "unclear". `windowed_twin` alone is no evidence, because its window
    # also hides the first token. Many models need this token as an attention sink, whatever the
    # text is. If neither `windowed_twin` nor `far_swap` sees an effect, only positions differ.
    exact, twin = found["exact_context"].answer, found["windowed_twin"].answer
    unseen = exact != "nothing" and twin == "nothing" and found["far_swap"].answer == "no"
    return "unclear" if unseen or {exact, twin} == {"helps", "harms"} else exact
