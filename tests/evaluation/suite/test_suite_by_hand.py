"""The suite's rows, sentences and files from losses that are known, counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.evaluation.suite import (
    context,
    perplexity,
)
from megatron.evaluation.suite.intervals import FEWEST, Estimate, mean_of
from megatron.evaluation.suite.measure import Measure, Row, Sample, Subject
from megatron.evaluation.suite.verdict import far_text, verdict
from megatron.parallel.groups import build_groups

CPU = build_groups(torch.device("cpu"))
# 3 documents with 2 sequences each; the token at position t of sequence n is 1000 n + t.
COUNTED = np.arange(6)[:, None] * 1000 + np.arange(129)
SAMPLE = Sample(COUNTED, np.repeat(np.arange(3), 2), 32, (32, 64, 128), 400)


def subject(loss_fn):
    return Subject(torch.nn.Linear(1, 1), CPU, 1000, loss_fn=loss_fn)


def position_of_target(inputs, targets):
    """Stand for a model: the loss of a target is its position in the text."""
    return (targets % 1000).double()


def same(value, documents=3):
    return Estimate(pytest.approx(value), pytest.approx(value), pytest.approx(value), documents)


def test_bins_double_and_the_tail_is_an_eighth():
    assert SAMPLE.bins(1) == [(1, 2), (2, 4), (4, 8), (8, 16), (16, 32), (32, 64), (64, 129)]
    assert SAMPLE.bins(33) == [(33, 66), (66, 129)]
    tails = [Sample(COUNTED, SAMPLE.documents, 32, (n,), 1).tail for n in (4, 8, 16, 1024, 4096)]
    assert tails == [1, 1, 2, 128, 128]


def test_the_receptive_field_scores_the_same_targets_at_each_context():
    full_nT = subject(position_of_target).losses(COUNTED)
    assert full_nT[3].tolist() == list(range(1, 129))
    rows = context.receptive_field(subject(position_of_target), SAMPLE, full_nT).rows
    mean = sum(range(113, 129)) / 16  # the last 16 of 128 targets
    assert [row.at["context"] for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128]
    for row in rows:
        assert row.estimate == same(mean) and row.also["more_than_best"] == 0.0


def field_rows(losses, worse=()):
    return [
        Row({"context": at}, Estimate(loss, loss, loss, 3), {"more_than_best": more, "worse": says})
        for at, loss in losses.items()
        for more, says in [(loss - min(losses.values()), "yes" if at in worse else "no")]
    ]


def test_the_field_is_the_shortest_context_that_is_not_clearly_worse():
    losses = {1: 2.0, 2: 1.1, 4: 1.05, 8: 1.0, 16: 1.2}
    assert context.field_of(field_rows(losses, worse=(1, 2, 16))) == 4
    assert context.field_of(field_rows(losses)) == 1


def test_a_context_is_worse_if_the_interval_of_the_difference_says_so():
    """The full loss is 0.01 below that of 64 tokens for half of the documents, and then for all."""
    after, text = {64: 1.01}, np.concatenate((COUNTED, COUNTED[:2]))

    def losses(inputs, targets):
        return torch.full(targets.shape, after.get(inputs.shape[1] // 16 * 16, 2.0))

    for full_n, worse in (([1.0, 1.02] * 4, "no"), ([1.0, 1.004] * 4, "yes")):
        full_nT = np.repeat(np.array(full_n)[:, None], 128, 1)
        found = context.receptive_field(
            subject(losses), replace(SAMPLE, sequences_nT=text, documents=np.arange(8)), full_nT
        )
        rows = {row.at["context"]: row.also for row in found.rows}
        assert (rows[32]["worse"], rows[64]["worse"], rows[128]["worse"]) == ("yes", worse, "no")
        assert found.answer == (64 if worse == "no" else 128)


def test_the_sentence_of_the_receptive_field_has_its_plurals():
    says = context.receptive_field(
        subject(lambda inputs, targets: torch.full(targets.shape, 2.0)),
        SAMPLE,
        np.full((6, 128), 2),
    ).says
    assert says == (
        "The shortest context that is not clearly worse than the best (that with 1 token) is "
        "1 token."
    )
    shorter = subject(
        lambda inputs, targets: 50.0 / (1 + torch.arange(targets.shape[1])) + 0 * targets
    )
    says = context.receptive_field(shorter, SAMPLE, np.full((6, 128), 0.1)).says
    assert says == (
        "The shortest context that is not clearly worse than the best (that with 128 tokens) is "
        "128 tokens."
    )


def measures_of(rows, far=(), **others):
    found = [Measure("receptive_field", "", "", "", rows, context.field_of(rows))]
    for name, answer in zip(("windowed_twin", "exact_context"), far or ("", ""), strict=True):
        says = f"The {name}."
        found.append(Measure(name, "", "", says, field_rows({1: 1.0}) if far else [], answer))
    for name in ("induction", "copy", "passkey", "ruler", "far_swap", "pointer"):
        row = [Row({"length": 1}, Estimate(0, 0, 0, 1))] if name in others else []
        found.append(Measure(name, "", "", others.get(name, "not shown"), row))
    return found


SEEN = "no longer context clearly helps the last tokens."


@pytest.mark.parametrize(
    ("worse", "first"),
    [
        ((), f"No use of context beyond the last token is seen: {SEEN}"),
        ((1,), f"The context is used up to 8 tokens: {SEEN}"),
        ((1, 8), "The context is used up to 64 tokens, the longest measured."),
    ],
)
def test_the_verdict_on_the_context(worse, first):
    rows = field_rows({1: 2.0, 8: 1.5, 64: 1.0}, worse)
    lines = verdict(measures_of(rows, copy="It copies."))
    assert lines == [first, "It copies."]


@pytest.mark.parametrize("documents", [2, 4, FEWEST - 1])
def test_few_documents_give_no_verdict(documents):
    """All losses differ by noise alone, or by far more than noise: neither gives an answer."""
    noise = np.random.default_rng(0).normal(5.0, 1.0, (FEWEST, 128))
    found = mean_of(noise[:documents], np.arange(documents))
    assert math.isnan(found.low) and math.isnan(found.high) and found.effect() == "unclear"
    assert str(found) == f"{found.value:.4f} (too few documents for an interval)"
    assert mean_of(noise, np.arange(FEWEST)).effect() == "gain"
    text = np.tile(COUNTED[:1], (documents, 1))
    sample = replace(SAMPLE, sequences_nT=text, documents=np.arange(documents))
    field = context.receptive_field(subject(position_of_target), sample, noise[:documents])
    assert field.answer == "unclear" and field.says.endswith("there are too few documents.")
    told = f"No verdict: {documents} documents were read, and intervals need {FEWEST}."
    assert verdict(measures_of(field.rows, copy="It copies.")) == [told]


def test_harm_is_told():
    rows = field_rows({1: 2.0, 8: 1.0, 64: 1.02}, worse=(1, 64))
    told = "Context beyond 8 tokens harms: with 64, the loss is 0.0200 nats higher."
    assert verdict(measures_of(rows))[1:] == [told]


@pytest.mark.parametrize(
    ("twin", "exact", "answer"),
    [
        ("helps", "helps", "helps"), ("nothing", "helps", "helps"), ("unclear", "harms", "harms"),
        ("helps", "unclear", "unclear"), ("helps", "nothing", "nothing"),
        ("harms", "nothing", "nothing"), ("harms", "helps", "unclear"),
        ("helps", "harms", "unclear"), ("nothing", "unclear", "unclear"),
    ],
)  # fmt: skip
def test_the_exact_context_tells_unless_the_twin_says_the_opposite(twin, exact, answer):
    lines = verdict(measures_of(field_rows({1: 1.0}), (twin, exact), far_swap="The swap."))
    assert lines[1:] == [f"Far text: {answer}.", "The exact_context.", "The windowed_twin.",
                         "The swap."]  # fmt: skip


def test_the_exact_context_reads_just_the_training_length():
    """Of 129 - 33 places with more than 32 tokens before them, all are read."""
    read = []

    def losses(inputs, targets):
        read.append(inputs % 1000)
        return torch.full(targets.shape, 3.0) + (targets % 1000)

    full_nT = np.tile(np.arange(1.0, 129.0), (6, 1))
    found = context.exact_context(subject(losses), SAMPLE, full_nT)
    assert all(inputs.shape[1] == 32 for inputs in read)
    assert sorted({int(row[0]) for inputs in read for row in inputs}) == list(range(1, 97))
    [row] = found.rows
    assert row.at == {"context": 32} and row.estimate == same(3.0)
    assert row.also == {"scored": 6 * 96, "loss": (33 + 128) / 2} and found.answer == "helps"
    assert found.says.endswith("exactly 32 tokens before each scored token: helps.")


@pytest.mark.parametrize(
    ("twin", "effect", "swapped"),
    [
        (2.0, "1.0000 [1.0000, 1.0000] nats: helps", "its content matters"),
        (0.5, "-0.5000 [-0.5000, -0.5000] nats: harms", "its content matters"),
        (
            1.0,
            "0.0000 [0.0000, 0.0000] nats: nothing",
            "its content does not matter",
        ),
    ],
)
def test_gains_over_the_twin_and_of_the_far_text(twin, effect, swapped):
    full_nT, twin_nT = np.full((6, 128), 1.0), np.full((6, 128), 1.0)
    twin_nT[:, 32:] = twin  # the target at index 32 has 33 tokens before it
    found = context.windowed_twin(SAMPLE, full_nT, twin_nT)
    assert found.says == f"Attention beyond 32 tokens lowers the loss by {effect}."
    assert [(row.at["context"], row.at["bins"]) for row in found.rows] == [
        (33, "all"), (33, "doubling"), (66, "doubling")
    ]  # fmt: skip
    assert all(row.estimate == same(twin - 1.0) for row in found.rows)
    model = subject(lambda inputs, targets: torch.full(targets.shape, twin))
    [row] = (found := context.far_swap(model, SAMPLE, full_nT)).rows
    assert row.at == {"kept": 32} and row.estimate == same(twin - 1.0)
    assert found.says.endswith(f"last 16 tokens changes by {row.estimate} nats: {swapped}.")


@pytest.mark.parametrize(
    ("exact", "twin", "swap", "answer"),
    [
        ("helps", "nothing", "no", "unclear"),
        ("harms", "nothing", "no", "unclear"),
        ("nothing", "nothing", "no", "nothing"),
        ("helps", "nothing", "yes", "helps"),
        ("helps", "unclear", "no", "helps"),
        ("harms", "harms", "no", "harms"),
        ("helps", "harms", "yes", "unclear"),
    ],
)
def test_other_positions_alone_are_no_far_text(exact, twin, swap, answer):
    answers = {"exact_context": exact, "windowed_twin": twin, "far_swap": swap}
    found = {name: Measure(name, "", "", "", [], given) for name, given in answers.items()}
    assert far_text(found) == answer


def test_far_text_needs_one_token_and_another_document():
    """After 32 tokens and the last 4 or 5, nothing or one token of 36 is left."""
    seen = []

    def spy(inputs, targets):
        seen.append(inputs.numpy() // 1000)
        return torch.zeros(targets.shape)

    full_nT = np.zeros((4, 36))
    for train, rows in ((33, 0), (32, 1)):
        sample = Sample(COUNTED[:4, :37], np.array([0, 0, 0, 1]), train, (36,), 400)
        assert len(context.far_swap(subject(spy), sample, full_nT).rows) == rows
    [inputs] = seen
    assert inputs[:, 1:].tolist() == [[n] * 35 for n in range(4)]
    assert inputs[:3, 0].tolist() == [3, 3, 3] and inputs[3, 0] < 3


def test_bins_of_the_twin_and_of_positions_hold_their_own_targets():
    full_nT = np.tile(np.arange(1.0, 129.0), (6, 1))
    rows = context.windowed_twin(SAMPLE, 0 * full_nT, full_nT).rows
    middles = [(33 + 128) / 2, (33 + 65) / 2, (66 + 128) / 2]
    assert [row.estimate.value for row in rows] == middles
    rows = perplexity.by_position(SAMPLE, full_nT).rows
    assert [row.estimate.value for row in rows] == [1, 2.5, 5.5, 11.5, 23.5, 47.5, 96]


def test_each_length_cuts_the_same_text():
    """The last 100 = 3 x 32 + 4 targets: a remainder at the start is not measured."""
    read = []

    def losses(inputs, targets):
        read.append(targets % 1000)
        return position_of_target(inputs, targets) / 100

    text = COUNTED[:, :101]
    sample = Sample(text, SAMPLE.documents, 32, (32, 50, 100), 400)
    full_nT = subject(losses).losses(text)
    read.clear()
    found = perplexity.by_length(subject(losses), sample, full_nT, lambda ids: 2 + 0 * ids)
    targets = {len(rows[0]): rows[:, 0].tolist() for rows in read}
    assert targets[32][:3] == [5, 37, 69] and targets[50][:2] == [1, 51] and 100 not in targets
    losses_by_hand = [(5 + 100) / 200, (1 + 100) / 200, (1 + 100) / 200]
    assert [row.also["loss"] for row in found.rows] == pytest.approx(losses_by_hand)
    bits = [loss / math.log(2) / 2 for loss in losses_by_hand]
    assert [row.also["bits_per_byte"] for row in found.rows] == pytest.approx(bits)
    assert found.says == (
        "Perplexity is 1.69 at 32 tokens and 1.66 at 100; it is lowest at 50. "
        "Lengths that do not divide 100 leave out up to 4 tokens at the start of each sequence."
    )
