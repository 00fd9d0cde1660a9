"""Search the built documentation site as the browser does.

The theme's search worker (assets/javascripts/workers/search.*.js) builds a lunr index of
search_index.json: no stemming, no length normalisation (b = 0), a factor for each field and each
page. It searches each word with a trailing wildcard and multiplies lunr's score of a section by 1 +
g^2. Here g is the share of the words that match, plus 1 for the entry of a whole page. Results are
grouped by page.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lunr.builder import Builder
from lunr.index import Index
from lunr.stop_word_filter import stop_word_filter


class SiteSearch:
    """The search of a built site.

    Args:
        site: The folder that `mkdocs build` wrote.
    """

    def __init__(self, site: Path):
        content = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
        self.settings: dict[str, Any] = content["config"]
        self.separator = re.compile(self.settings["separator"])
        self.entries = {entry["location"]: entry for entry in content["docs"]}
        assert self.settings["pipeline"] == ["stopWordFilter"]
        self.index = self._index()

    def _index(self) -> Index:
        builder = Builder()
        builder.pipeline.add(stop_word_filter)
        builder.b(0)
        builder.ref("location")
        for name, options in self.settings["fields"].items():
            builder.field(name, options["boost"], self._words(name))
        for entry in self.entries.values():
            builder.add(entry, {"boost": entry.get("boost", 1)})
        return builder.build()

    def _words(self, field: str) -> Callable[[dict[str, Any]], list[str]]:
        def words(entry: dict[str, Any]) -> list[str]:
            chunks = re.split(r"<[^>]+>", entry.get(field) or "")
            return [
                word.lower()
                for chunk in chunks
                for word in self.separator.split(html.unescape(chunk))
                if word
            ]

        return words

    def results(self, words: str) -> list[str]:
        """Return the addresses of the sections that match, best first."""
        terms = words.lower().split()
        found = []
        for match in self.index.search(" ".join(f"{term}*" for term in terms)):
            entry = match["ref"]
            matched = match["match_data"].metadata
            share = sum(any(word.startswith(term) for word in matched) for term in terms)
            g = ("#" not in entry) + share / len(terms)
            found.append((match["score"] * (1 + g**2), entry))
        return [entry for _, entry in sorted(found, key=lambda each: -each[0])]
