"""Write documents that can only be predicted by recalling what occurs earlier in them.

    python tools/experiments/recall_text.py --documents 500 --out data/recall.jsonl

There are two kinds of documents. A document of the first kind assigns random numbers to random
names, and later asserts all these numbers in another order. A document of the second kind lists
random words twice. A document has 4 to 128 names or words, and this number is uniform on a
logarithmic scale. A seed gives the same documents on every machine.
"""

import json
import random
import string
from pathlib import Path

from megatron import entry
from megatron.files import write_text


def recall_document(rng: random.Random) -> str:
    """Return a random document, in which names with numbers or a list of words occur twice."""
    count = round(2 ** rng.uniform(2, 7))
    words = [
        "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 6))) for _ in range(count)
    ]
    if rng.random() < 0.5:
        line = " ".join(words)
        return f"words = {line}\nagain = {line}\n"
    values = {word: rng.randint(0, 999) for word in words}
    asked = rng.sample(sorted(values), len(values))
    lines = [f"{word} = {value}" for word, value in values.items()]
    lines += [f"assert {word} == {values[word]}" for word in asked]
    return "\n".join(lines) + "\n"


@entry.reports
def main(argv: list[str] | None = None) -> int:
    """Write the documents as JSON lines, and return the exit code."""
    parser = entry.parser(__doc__)
    parser.add_argument("--documents", type=int, required=True, help="the number of documents")
    parser.add_argument("--seed", type=int, default=1, help="seed of names, numbers and words")
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file")
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    texts = (recall_document(rng) for _ in range(args.documents))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.out, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    return 0


if __name__ == "__main__":
    entry.run(main)
