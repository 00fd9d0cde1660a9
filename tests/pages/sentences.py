"""Print random sentences of the pages for users, to see whether one must be read twice.

    python -m tests.pages.sentences --seed 1 --count 40

Code, tables, headings and formulas are left out.
"""

from __future__ import annotations

import argparse
import random
import re

from tests.helpers.paths import ROOT
from tests.pages.test_words import user_pages


def sentences(text: str) -> list[str]:
    """Return the sentences of a page."""
    text = re.sub(r"^ *```.*?^ *```|^\$\$.*?^\$\$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=[-*] |\d+\. )", text):
        if re.match(r"\s*([#|!<]|    )", block):
            continue
        line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
        found += [each.lstrip("-*> ") for each in re.split(r"(?<=[.:?]) (?=[A-Z`])", line)]
    return [each for each in found if len(each.split()) > 5]


def main() -> None:
    """Print the sentences, each with its page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    arguments = parser.parse_args()
    pages = {page: sentences((ROOT / page).read_text()) for page in user_pages()}
    every = [(page, each) for page, found in pages.items() for each in found]
    chosen = random.Random(arguments.seed).sample(every, arguments.count)
    for page, each in chosen:
        print(f"{page}: {each}\n")
    print(
        f"{len(every)} sentences, {sum(len(each.split()) > 30 for _, each in every)} above 30 words"
    )


if __name__ == "__main__":
    main()
