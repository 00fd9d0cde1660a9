"""The suite's rows, sentences and files from losses that are known, counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron.evaluation.suite import (
    context,
    perplexity,
    recall,
)
from megatron.evaluation.suite.intervals import Estimate
from megatron.evaluation.suite.measure import Measure, Row, Sample, Subject
from megatron.evaluation.suite.verdict import verdict
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
        assert row.estimate == same(mean) and row.also["more_than_full"] == 0.0


def field_rows(losses, more=None):
    rows = []
    for at, loss in losses.items():
        gain = (more or {}).get(at, (0.0, 0.0))
        also = {"more_than_full": gain[0], "more_low": gain[0], "more_high": gain[1]}
        rows.append(Row({"context": at}, Estimate(loss, loss, loss, 3), also))
    return rows


def test_the_field_is_the_shortest_context_within_a_percent_of_the_best():
    assert context.field_of(field_rows({1: 800.0, 2: 404.1, 4: 404.0, 8: 400.0, 16: 480.0})) == (
        4,
        8,
    )
    assert context.field_of(field_rows({1: 1.0, 2: 1.0})) == (1, 1)


def test_the_sentence_of_the_receptive_field_has_its_plurals():
    says = context.receptive_field(
        subject(lambda inputs, targets: torch.full(targets.shape, 2.0)),
        SAMPLE,
        np.full((6, 128), 2),
    ).says
    assert says == (
        "The shortest context with a loss within 1% of the best (that with 1 token) is 1 token."
    )
    shorter = subject(
        lambda inputs, targets: 50.0 / (1 + torch.arange(targets.shape[1])) + 0 * targets
    )
    says = context.receptive_field(shorter, SAMPLE, np.full((6, 128), 0.1)).says
    assert says == (
        "The shortest context with a loss within 1% of the best (that with 128 tokens) is "
        "128 tokens."
    )


def measures_of(rows, swap=(), says="The swap.", **others):
    found = [
        Measure("receptive_field", "", "", "", rows),
        Measure("far_swap", "", "", says, [*swap]),
    ]
    for name in ("induction", "copy", "passkey"):
        row = [Row({"length": 1}, Estimate(0, 0, 0, 1))] if name in others else []
        found.append(Measure(name, "", "", others.get(name, "not shown"), row))
    return found


@pytest.mark.parametrize(
    ("losses", "first"),
    [
        ({1: 1.0, 8: 1.0, 64: 1.0}, "No context is used: all tokens but the last are worth less"),
        ({1: 2.0, 8: 1.0, 64: 1.0}, "No context beyond 8 tokens is used: it is worth less than 1%"),
        ({1: 2.0, 8: 1.5, 64: 1.0}, "The context is used up to 64 tokens, the longest measured."),
    ],
)
def test_the_verdict_on_the_context(losses, first):
    lines = verdict(measures_of(field_rows(losses), copy="It copies."))
    assert lines[0].startswith(first) and lines[1:] == ["It copies."]


@pytest.mark.parametrize(
    ("more", "harms"),
    [
        ((-0.02, -0.01), True),
        ((-0.02, 0.01), False),
        ((-0.010, -0.001), False),
        ((0.5, 0.6), False),
    ],
)
def test_harm_is_a_loss_that_more_context_raises_by_a_percent(more, harms):
    rows = field_rows({1: 2.0, 8: 1.0, 64: 1.02}, {8: more})
    lines = verdict(measures_of(rows))
    told = "Context beyond 8 tokens does harm: with 64, the loss is 0.0200 nats higher."
    assert lines[1:] == [told] * harms


@pytest.mark.parametrize(
    ("low", "kept", "told"), [(0.1, 8, True), (-0.1, 8, False), (0.1, 7, False), (0.1, 9, True)]
)
def test_an_effect_of_far_text_beyond_the_field_is_told(low, kept, told):
    swap = [Row({"kept": kept}, Estimate(0.2, low, 0.3, 3))]
    lines = verdict(measures_of(field_rows({1: 2.0, 8: 1.0, 64: 1.0}), swap))
    assert lines[1:] == ["Small, but not nothing: The swap."] * told


@pytest.mark.parametrize(
    ("twin", "effect", "swapped"),
    [
        (2.0, "gains: 1.0000 [1.0000, 1.0000] nats", "the far text matters"),
        (0.5, "loses: -0.5000 [-0.5000, -0.5000] nats", "the far text did harm"),
        (1.0, "neither gains nor loses: 0.0000 [0.0000, 0.0000] nats", "no effect is seen"),
    ],
)
def test_gains_over_the_twin_and_of_the_far_text(twin, effect, swapped):
    full_nT, twin_nT = np.full((6, 128), 1.0), np.full((6, 128), 1.0)
    twin_nT[:, 32:] = twin  # the target at index 32 has 33 tokens before it
    found = context.windowed_twin(SAMPLE, full_nT, twin_nT)
    assert found.says == f"By attention beyond 32 tokens, the model {effect}."
    assert [(row.at["context"], row.at["bins"]) for row in found.rows] == [
        (33, "all"), (33, "doubling"), (66, "doubling")
    ]  # fmt: skip
    assert all(row.estimate == same(twin - 1.0) for row in found.rows)
    model = subject(lambda inputs, targets: torch.full(targets.shape, twin))
    [row] = (found := context.far_swap(model, SAMPLE, full_nT)).rows
    assert row.at == {"kept": 32} and row.estimate == same(twin - 1.0)
    assert found.says.endswith(f"last 16 tokens changes by {row.estimate} nats: {swapped}.")


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
    assert found.says == ("Perplexity is 1.69 at 32 tokens and 1.66 at 100; it is lowest at 50.")


def answers_seen(draws=None):
    """Return texts for `copying`, and a model with loss 1 for tokens seen before, otherwise 3."""
    read = []

    def losses(inputs, targets):
        text = torch.cat([inputs, targets[:, -1:]], 1)
        read.append(text)
        seen = [
            [1.0 if x in row[: t + 1] else 3.0 for t, x in enumerate(row[1:])]
            for row in text.tolist()
        ]
        return torch.tensor(seen)

    return read, subject(losses)


def test_a_needle_is_hidden_at_its_depth_and_asked_for_at_the_end():
    read, model = answers_seen()
    ids = np.arange(6 * 129).reshape(6, 129) + 10**6  # nothing occurs twice
    sample = Sample(ids, np.arange(6), 32, (128,), 4 * 128 * 6)
    found = recall.copying(model, sample)
    assert [row.at for row in found.rows] == [
        {"length": 128, "depth": depth} for depth in (0.0, 0.5, 0.9)
    ]
    room = 129 - 24 - 24
    for row, depth, texts in zip(
        found.rows, (0.0, 0.5, 0.9), zip(read[::2], read[1::2], strict=True), strict=True
    ):
        present, control = (each.numpy() for each in texts)
        split = round(depth * room)
        for number, (text, other) in enumerate(zip(present, control, strict=True)):
            own = ids[np.linspace(0, 5, 8).astype(int)][
                np.unique(np.linspace(0, 5, 8).astype(int), return_index=True)[1]
            ][number]
            cue, answer = text[split : split + 8], text[split + 8 : split + 24]
            assert text.tolist() == [*own[:split], *cue, *answer, *own[split:room], *cue, *answer]
            assert other[split : split + 8].tolist() == cue.tolist()
            assert other[-24:].tolist() == text[-24:].tolist()
            assert other[split + 8 : split + 24].tolist() != answer.tolist()
        assert row.also["probability"] == pytest.approx(math.exp(-1))
        assert 1.2 < row.estimate.value <= 2.0  # some tokens of the answer are in the text
    assert "the answer in the text helps in 3 of 3 cells, up to length 128" in found.says


def test_needles_that_fill_half_the_text_are_left_out():
    """Cue and answer of 24 tokens stand twice: 2 x (24 + 24) = 96."""
    model = subject(lambda inputs, targets: torch.ones(targets.shape))
    for length, cells in ((95, 0), (96, 3)):
        ids = np.arange(6 * 129).reshape(6, 129)
        sample = Sample(ids, np.arange(6), 32, (length,), 400)
        found = recall.copying(model, sample)
        assert len(found.rows) == cells
        assert found.says == (
            "Copy of random tokens: no answer is predicted better because it occurs in the text."
        )


def test_repeated_tokens_gain_what_the_first_copy_lacks():
    _, model = answers_seen()
    ids = np.arange(6 * 129).reshape(6, 129)
    found = recall.induction(model, Sample(ids, np.arange(6), 32, (64,), 4 * 64))
    assert [row.at["distance"] for row in found.rows] == [8, 16, 32]
    assert [row.estimate.documents for row in found.rows] == [8, 8, 8]
    for row in found.rows:
        assert row.estimate.value == pytest.approx(2.0, abs=0.4)
        assert row.also["second_minus_first"] == pytest.approx(-2.0, abs=0.4)
    best = max(found.rows, key=lambda row: row.estimate.value)
    assert found.says == (
        "Repeated random tokens are predicted better up to a distance of 32, most at "
        f"{best.at['distance']}: by {best.estimate.value:.3f} nats."
    )
    tokens = {4 * 64: 8, 4 * 8 * 30: 30, 10**6: 64}
    for given, count in tokens.items():
        sample = Sample(ids, np.arange(6), 32, (64,), given)
        assert recall.induction(model, sample).rows[0].estimate.documents == count
