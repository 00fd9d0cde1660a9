"""Test that the pages for users have at most 30,000 words, so that people can read them.

    python -m tests.pages.test_words

prints the words of each page. A word is what blanks separate, in code and tables too.
"""

from __future__ import annotations

import re

from tests.helpers.paths import ROOT

LIMIT = 30_000
OTHERS = ("docs/lab/", "docs/configuration.md", "docs/api.md", "CHANGELOG.md", "SECURITY.md")
"""Not counted: the lab, the pages that a program writes, the list of changes, and the policy for
security, which is no page to learn from."""


def user_pages() -> list[str]:
    """Return the pages of the site's navigation that are for users."""
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return [page for page in re.findall(r": (\S+\.md)$", nav, re.M) if not page.startswith(OTHERS)]


def words() -> dict[str, int]:
    """Return the number of words of each page for users."""
    return {page: len((ROOT / page).read_text().split()) for page in user_pages()}


def test_the_pages_for_users_are_short_enough_to_read():
    found = words()
    docs = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert docs - set(found) == {"docs/configuration.md", "docs/api.md"}
    assert {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "configs/README.md"} <= set(found)
    assert sum(found.values()) <= LIMIT, "decide what to leave out, or move it to docs/lab"


if __name__ == "__main__":
    for name, count in sorted(words().items(), key=lambda each: -each[1]):
        print(f"{count:6,} {name}")
    print(f"{sum(words().values()):6,} of {LIMIT:,}")
