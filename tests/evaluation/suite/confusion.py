"""Compare the suite's answers about planted models with the expected ones; write a table.

    python -m tests.evaluation.suite.confusion --seeds 0 1 --out docs/results/suite_planted.csv
    python -m tests.evaluation.suite.confusion --seeds 0 1 --documents 200 --tokens 102400 --out ...

Each seed draws another language, other documents and other random weights. The table has a line for
each model, seed and question.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.evaluation.suite.all_measures import measure_with_progress
from megatron.evaluation.suite.measure import Measure
from megatron.evaluation.suite.verdict import far_text
from tests.evaluation.suite.planted import EXPECTED, NAMES, Ascii, Language, subject_of

TOKENS = 8192
"""The tokens that each result reads, as `eval_suite_tokens` gives them."""
DOCUMENTS = 24
"""The documents of each language."""


def answers(measures: list[Measure]) -> dict[str, Any]:
    """Return what the suite answers: for each field of `Expected` that it knows, a value."""
    found = {measure.name: measure for measure in measures}
    given = {
        "context": found["receptive_field"].answer,
        "far": far_text(found),
        "matters": {"yes": True, "no": False}.get(found["far_swap"].answer, "unclear"),
        "induction": found["induction"].answer,
    }
    for name in ("copy", "passkey"):
        given[name] = frozenset(map(tuple, found[name].answer))
    return given | found["ruler"].answer


def judged(expected: Any, answer: Any) -> str:
    """Return "yes" for a right answer, "missed" for less than there is, and "no" for a false one.

    An answer misses if its reach is shorter, if it names fewer places, or if it is unclear.
    """
    right = expected if isinstance(expected, tuple) else (expected,)
    if answer in right:
        return "yes"
    less = isinstance(answer, int | frozenset) and not isinstance(answer, bool)
    return "missed" if answer == "unclear" or (less and answer < right[-1]) else "no"


def shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " or ".join(map(str, value))
    if isinstance(value, frozenset):
        cells = sorted(value)
        return " ".join(f"{length}@{depth:g}" for length, depth in cells) or "nowhere"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def rows_of(
    name: str, seed: int, tokens: int = TOKENS, documents: int = DOCUMENTS
) -> list[dict[str, Any]]:
    """Measure one planted model, and return a row for each question."""
    language = Language(seed)
    sample = language.sample(tokens, documents)
    measures = measure_with_progress(subject_of(name, language, seed), sample, Ascii())
    given, rows = answers(measures), []
    for question, expected in asdict(EXPECTED[name]).items():
        if question in given:
            answer = given[question]
            row = {"expected": shown(expected), "answer": shown(answer)}
            row["right"] = judged(expected, answer)
            rows.append({"model": name, "seed": seed, "question": question} | row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the answers as a table of Markdown: models by questions, over all seeds."""
    questions = list(dict.fromkeys(row["question"] for row in rows))
    lines = ["| model | " + " | ".join(questions) + " |", "|---|" + "---|" * len(questions)]
    for name in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for question in questions:
            given = [r["answer"] for r in rows if (r["model"], r["question"]) == (name, question)]
            if question in ("copy", "passkey"):
                given = [str(each.count("@")) for each in given]
            cells.append(" or ".join(sorted(set(given), key=lambda text: (len(text), text))))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--models", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        for name in args.models:
            rows += rows_of(name, seed, args.tokens, args.documents)
    with args.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(table(rows))
    for row in rows:
        if row["right"] != "yes":
            print(*row.values(), sep="  ")
    counts = Counter(row["right"] for row in rows)
    print(f"{counts['yes']} of {len(rows)} answers are right, {counts['missed']} miss something")


if __name__ == "__main__":
    main()
