"""Ask RULER's questions (arXiv 2404.06654) of a base model, by the loss of the right answers.

The haystack is the suite's text. The statements are short, and are hidden in the first half of the
text:

| task | statements | question |
|---|---|---|
| keys | four keys with a number each | the number of one key |
| values | two keys with two numbers each | both numbers of one key |
| tracking | two chains: a = 12345, b = a, c = b | the number of c |
| words | two words four times each, two words once each | the two common words |

`recall.passkey` is RULER's task with a single needle. In the control text `binding`, the answers
belong to the other keys, the other chain or the other words. In the control text `order`, the
tokens of the answer are in reverse order.
"""

from functools import partial

import numpy as np

from megatron.data.tokenizers.base import Tokenizer
from megatron.evaluation.suite import recall
from megatron.evaluation.suite.measure import Measure, Sample, Subject

SHORTEST = 256
"""The shortest texts, in tokens, in which the questions are asked."""
WORDS = (
    "apple", "bread", "cloud", "drum", "fence", "glass", "horse", "island", "jacket", "kettle",
    "lemon", "mirror", "needle", "ocean", "pencil", "river",
)  # fmt: skip


def ruler(subject: Subject, sample: Sample, tokenizer: Tokenizer) -> Measure:
    """Measure whether the model answers RULER's questions, in texts of two lengths."""
    # The lengths are the shortest with at least `SHORTEST` tokens, and the longest.
    lengths = [length for length in sample.lengths if length >= SHORTEST]
    cells = [
        recall.Cell({"length": length, "task": name}, partial(draw, tokenizer))
        for length in dict.fromkeys([*lengths[:1], *lengths[-1:]])
        for name, draw in TASKS.items()
    ]
    rows = recall.ask(subject, sample, cells)
    answer = dict.fromkeys(TASKS, 0)
    for row in recall.found_cells(rows):
        answer[row.at["task"]] = row.at["length"]
    said = [f"{name} up to {length:,} tokens" for name, length in answer.items() if length]
    says = f"RULER's questions: answers are found for {', '.join(said) or 'none'}."
    says = (
        says if rows else f"RULER's questions: no text has {SHORTEST:,} tokens and room for them."
    )
    return Measure("ruler", "RULER's questions", f"gain, {recall.NATS}", says, rows, answer)


def _keys(tokenizer: Tokenizer, rng: np.random.Generator) -> recall.Puzzle:
    facts = [
        _set(tokenizer, word, rng.integers(10**4, 10**5))
        for word in rng.choice(WORDS, 4, replace=False)
    ]
    return recall.with_controls(facts, [1, 2, 3, 0], [int(rng.integers(4))])


def _values(tokenizer: Tokenizer, rng: np.random.Generator) -> recall.Puzzle:
    first, second = rng.choice(WORDS, 2, replace=False)
    facts = [
        _set(tokenizer, word, rng.integers(10**4, 10**5)) for word in (first, second, first, second)
    ]
    return recall.with_controls(facts, [1, 0, 3, 2], [0, 2] if rng.random() < 0.5 else [1, 3])


def _tracking(tokenizer: Tokenizer, rng: np.random.Generator) -> recall.Puzzle:
    """Draw a puzzle with two chains of assignments such as a = 12345, b = a, c = b."""
    # The statements of the two chains alternate. The question is about one chain's last variable.
    chains = rng.choice(WORDS, (2, 3), replace=False)
    facts = [_set(tokenizer, chain[0], rng.integers(10**4, 10**5)) for chain in chains]
    facts += [_set(tokenizer, chain[i], chain[i - 1]) for i in (1, 2) for chain in chains]
    asked = int(rng.integers(2))
    found = recall.with_controls(facts, [1, 0, 2, 3, 4, 5], [asked])
    cue = recall.pieces(tokenizer, f"\n{chains[asked, 2]} ->", " 1")[0]
    return recall.Puzzle(found.statements, found.controls, cue, found.answer)


def _words(tokenizer: Tokenizer, rng: np.random.Generator) -> recall.Puzzle:
    parts = [
        recall.pieces(tokenizer, "\n-", f" {word}", "\n")
        for word in rng.choice(WORDS, 4, replace=False)
    ]
    words, order = [*map(np.concatenate, parts)], rng.permutation([0, 1] * 4 + [2, 3])
    statements, others = ([words[i ^ flip] for i in order] for flip in (0, 2))
    answer = np.concatenate([*parts[0][1:], *parts[1][:2]])
    return recall.Puzzle(statements, {recall.BINDING: others}, parts[0][0], answer)


def _set(tokenizer: Tokenizer, name: str, value: object) -> recall.Fact:
    cue, answer, end = recall.pieces(tokenizer, f"\n{name} =", f" {value}", "\n")
    return cue, answer, end


TASKS = {"keys": _keys, "values": _values, "tracking": _tracking, "words": _words}
