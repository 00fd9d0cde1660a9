"""Measure whether the model recalls earlier tokens: repeated tokens, copies and a passkey.

Nothing is generated. The model reads the right answers. The losses of the answers are compared with
their losses in control texts, which do not reveal the answer. The measures therefore work for every
vocabulary, and show a small gain long before a model would generate the whole answer.

A control text has the same tokens as the text, in almost the same places. A model that only counts
tokens therefore gains nothing. The exception is the task `words` of RULER. This task is to count
words, so its control text has other counts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from os.path import commonprefix
from typing import Any

import numpy as np

from megatron.data.tokenizers.base import Tokenizer
from megatron.evaluation.suite.intervals import estimate, mean_of
from megatron.evaluation.suite.measure import Measure, Row, Sample, Subject
from megatron.readable_numbers import told_apart

DEPTHS = (0.0, 0.5, 0.9)
"""The places where a needle is hidden, as the fraction of the text that comes before the needle."""
NATS = "nats per token"
NOTICEABLE = 0.05
"""A gain counts if its whole interval is above this, in nats per token."""
TEXTS = 24
"""The least number of texts for each result."""
BLOCK = 8
"""Induction's control text reverses blocks of this many tokens."""
ORDER, BINDING = "order", "binding"
"""The controls: the answer's tokens in reverse order; the answers of other cues."""


@dataclass(frozen=True)
class Puzzle:
    """Statements to hide in a text, and a question about the statements for the end of the text.

    Attributes:
        statements: The tokens of each statement, in their order in the text.
        controls: Maps the name of a control text to the statements in it. A control text does not
            reveal the answer.
        cue: The tokens of the question.
        answer: The tokens whose loss is measured. The text ends with `cue` and then `answer`.
    """

    statements: list[np.ndarray]
    controls: dict[str, list[np.ndarray]]
    cue: np.ndarray
    answer: np.ndarray

    @property
    def size(self) -> int:
        """The number of tokens in the statements, the question and the answer."""
        return sum(map(len, (*self.statements, self.cue, self.answer)))


Draw = Callable[[np.random.Generator], Puzzle | None]
"""A function that draws a random puzzle, or returns None if the tokenizer allows none."""


@dataclass(frozen=True)
class Cell:
    """One experiment: random puzzles in texts of one length.

    Attributes:
        at: The labels of the result. The label `length` is the length of the texts.
        draw: The function that draws a random puzzle.
        depth: The place of a single statement: 0 is the start of the text, 1 is just before the
            question. With None, the places of the statements are random in the first half of the
            text.
    """

    at: dict[str, Any]
    draw: Draw
    depth: float | None = None


def pieces(tokenizer: Tokenizer, *texts: str) -> list[np.ndarray]:
    """Encode the concatenation of several texts, and split the tokens into one piece per text."""
    # The texts are not encoded one by one, because some tokenizers add a space to the start of each
    # input. A token that spans two texts belongs to the later text.
    whole = tokenizer.encode("".join(texts)).tolist()
    parts = (tokenizer.encode("".join(texts[:end])).tolist() for end in range(1, len(texts)))
    cuts = [len(commonprefix([part, whole])) for part in parts]
    return np.split(np.array(whole, np.int64), np.maximum.accumulate(cuts))


def induction(subject: Subject, sample: Sample) -> Measure:
    """Measure induction: how much better random tokens are predicted at their second occurrence.

    Each text consists of two copies of d random tokens. The measure has one result for each d.
    """
    # In the control text, the first copy has its blocks of 8 tokens reversed. The gain is the
    # second copy's loss in the control text minus its loss in the text. The first token of the
    # second copy is not scored.
    rng, gains, distance = np.random.default_rng(1), {}, BLOCK
    while 2 * distance <= sample.longest:
        count = min(64, max(TEXTS, sample.tokens // (4 * distance)))
        once = sample.random(rng, (count, distance))
        other = once.reshape(count, -1, BLOCK)[:, :, ::-1].reshape(count, distance)
        second_nT, control_nT = (
            subject.losses(np.concatenate((first, once), 1))[:, distance:]
            for first in (once, other)
        )
        gains[distance] = control_nT - second_nT
        distance *= 2
    rows = []
    for at, gain in gains.items():
        found = mean_of(gain, np.arange(len(gain)), comparisons=len(gains))
        rows.append(Row({"distance": at}, found, {"found": found.effect(NOTICEABLE, surely=True)}))
    reached = [row for row in rows if row.also["found"] == "gain"]
    says = "Random tokens are not predicted better when they occur for the second time."
    if reached:
        best = max(reached, key=lambda row: row.estimate.value)
        says = (
            f"Repeated random tokens are predicted better up to a distance of "
            f"{reached[-1].at['distance']:,}, most at {best.at['distance']:,}: by "
            f"{best.estimate.value:.3f} nats."
        )
    answer = reached[-1].at["distance"] if reached else 0
    return Measure("induction", "Induction", f"gain, {NATS}", says, rows, answer)


def copying(subject: Subject, sample: Sample) -> Measure:
    """Measure whether the model copies 16 random tokens when the 8 tokens before them recur."""

    def draw(rng: np.random.Generator) -> Puzzle | None:
        tokens = sample.random(rng, (1, 24))[0]
        return with_controls([(tokens[:8], tokens[8:], tokens[:0])], [0], [0])

    return by_depth(subject, sample, "copy", "Copy of random tokens", draw)


def passkey(subject: Subject, sample: Sample, tokenizer: Tokenizer) -> Measure:
    """Measure whether the model recalls a passkey, five digits that occur earlier in the text.

    At the end of the text, the model is asked for the digits.
    """

    def draw(rng: np.random.Generator) -> Puzzle | None:
        for _ in range(20):
            texts = ("\nThe pass key is", f" {rng.integers(10_000, 100_000)}", ". Remember it.\n")
            cue, answer, end = pieces(tokenizer, *texts)
            if (answer != answer[::-1]).any():
                return with_controls([(cue, answer, end)], [0], [0])
        return None

    return by_depth(subject, sample, "passkey", "Passkey", draw)


Fact = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The tokens of a cue, of its answer, and of the end of the statement."""


def with_controls(facts: list[Fact], others: list[int], asked: list[int]) -> Puzzle:
    """Make a puzzle with control texts from facts.

    The puzzle hides the facts in a text, and asks for some of their answers.

    Args:
        facts: The facts. Each fact consists of a cue, the answer, and the end of the statement.
        others: For each fact, the index of another fact. In a control text, each fact has the
            answer of the other fact.
        asked: The indices of the facts that the question asks for, in this order.
    """
    # The puzzle has up to two controls. In the control `order`, the tokens of the asked answers are
    # reversed. In the control `binding`, fact i has the answer of fact `others[i]`. This control is
    # left out if every fact keeps its own answer.
    statements = [np.concatenate(fact) for fact in facts]
    controls = {}
    if any((facts[number][1] != facts[number][1][::-1]).any() for number in asked):
        controls[ORDER] = [
            np.concatenate((cue, answer[::-1] if number in asked else answer, end))
            for number, (cue, answer, end) in enumerate(facts)
        ]
    if others != [*range(len(facts))]:
        controls[BINDING] = [
            np.concatenate((cue, facts[other][1], end))
            for (cue, _, end), other in zip(facts, others, strict=True)
        ]
    question = np.concatenate([statements[number] for number in asked])
    start, rest = len(facts[asked[0]][0]), len(question) - len(facts[asked[-1]][2])
    return Puzzle(statements, controls, question[:start], question[start:rest])


def by_depth(subject: Subject, sample: Sample, name: str, title: str, draw: Draw) -> Measure:
    """Measure recall of a statement by its depth (place in the text), and by the text's length.

    Args:
        name: The name of the measure.
        title: The title of the measure in the report.
        draw: A function that draws a random puzzle.
    """
    # The lengths are the shortest, a middle and the longest of `sample.lengths`.
    lengths = (sample.lengths[0], sample.lengths[len(sample.lengths) // 2], sample.longest)
    cells = [
        Cell({"length": length, "depth": depth}, draw, depth)
        for length in dict.fromkeys(lengths)
        for depth in DEPTHS
    ]
    rows = ask(subject, sample, cells)
    found, asked = found_cells(rows), {(row.at["length"], row.at["depth"]) for row in rows}
    says = f"{title}: no answer is surely predicted better because it occurs in the text."
    if not rows:
        says = f"{title}: not measured. No text has room, or no answer differs from its reverse."
    if found:
        best = max(found, key=lambda row: row.estimate.value)
        before, after = told_apart(best.also["control_probability"], best.also["probability"])
        says = (
            f"{title}: the answer in the text helps in {len(found)} of {len(asked)} cells, up to "
            f"length {max(row.at['length'] for row in found):,}; most at length "
            f"{best.at['length']:,} and depth {best.at['depth']:g}, by {best.estimate.value:.3f} "
            f"nats (the probability of a token goes from {before} to {after})."
        )
    answer = [[row.at["length"], row.at["depth"]] for row in found]
    return Measure(name, title, f"gain, {NATS}", says, rows, answer)


def found_cells(rows: list[Row]) -> list[Row]:
    """Return one row of each experiment in which the model finds the answer.

    The answer is found if all rows of the experiment are gains. The returned row is the one whose
    interval has the lowest start.

    Args:
        rows: The rows of all experiments. An experiment has one row for each control text.
    """
    cells = groupby(rows, lambda row: [row.at[name] for name in row.at if name != "control"])
    gains = (min(cell, key=lambda row: row.estimate.low) for _, cell in cells)
    return [row for row in gains if row.also["found"] == "gain"]


def ask(subject: Subject, sample: Sample, cells: list[Cell]) -> list[Row]:
    """Run the experiments `cells`: ask the model their questions.

    Return one row for each experiment and control text.
    """
    # An experiment has no rows if its texts are too short for its puzzle.
    asked = [(cell, *_losses(subject, sample, cell, 2 + n)) for n, cell in enumerate(cells)]
    total, rows = sum(len(controls) for _, _, controls, _ in asked), []
    for cell, losses, controls, documents in asked:
        for control, without in controls.items():
            gain = without - losses
            found = estimate(gain, np.ones(len(gain)), documents, comparisons=total)
            also = {
                "found": found.effect(NOTICEABLE, surely=True),
                "probability": float(np.exp(-losses).mean()),
                "control_probability": float(np.exp(-without).mean()),
            }
            rows.append(Row(cell.at | {"control": control}, found, also))
    return rows


def _losses(
    subject: Subject, sample: Sample, cell: Cell, seed: int
) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """Return the mean losses of the answers in the texts of one experiment.

    Returns:
        (losses [n], a dict from control text to losses [n], document of each text [n]).
    """
    # The losses are empty if the texts are too short for the puzzle, or no puzzle can be drawn.
    rng, length = np.random.default_rng(seed), cell.at["length"]
    count = max(TEXTS, sample.tokens // (4 * length))
    spread = np.unique(np.linspace(0, len(sample.documents) - 1, count).astype(int))
    texts: dict[str, list[np.ndarray]] = {}
    sizes = []
    for text in sample.sequences_nT[spread, : length + 1]:
        puzzle = cell.draw(rng)
        if puzzle is None or 2 * puzzle.size > length:
            return np.zeros(0), {}, spread
        drawn = sorted(rng.random(len(puzzle.statements)) / 2) if cell.depth is None else []
        depths = drawn or [cell.depth]
        for name, statements in ({"": puzzle.statements} | puzzle.controls).items():
            texts.setdefault(name, []).append(_with_statements(text, statements, depths, puzzle))
        sizes.append(len(puzzle.answer))
    losses = {
        name: np.array([row[-n:].mean() for row, n in zip(found, sizes, strict=True)])
        for name, each in texts.items()
        if len(each) == len(spread)
        for found in [subject.losses(np.stack(each))]
    }
    return losses.pop(""), losses, sample.documents[spread]


def _with_statements(
    text: np.ndarray, statements: list[np.ndarray], depths: list[float], puzzle: Puzzle
) -> np.ndarray:
    """Return the text with `statements` inserted at `depths`, and with the question at the end.

    The last tokens of `text` are left out, so that the result is as long as `text`.
    """
    room = len(text) - sum(map(len, (*statements, puzzle.cue, puzzle.answer)))
    splits = np.split(text[:room], [round(depth * room) for depth in depths])
    parts = zip(splits, [*statements, puzzle.cue], strict=True)
    return np.concatenate([*(part for pair in parts for part in pair), puzzle.answer])
