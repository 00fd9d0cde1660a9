"""Test docstrings, comments, error texts and pages: markup, `Raises:`, plain words.

Each rule is also tested on made-up text that breaks it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.sources import PRODUCT, docstrings, parsed, prose, sources

MARKUP = re.compile(r"``|:(class|func|meth|mod|attr|data|exc|obj|ref):")
WORDS = {
    r"anew|once more": "again",
    r"alike": "the same way, equally",
    r"besides": "apart from, also",
    r"beforehand": "before",
    r"but for": "except",
    r"whence|whither": "from where",
    r"thereof|therein|wherein": "of it, in it",
    r"whoever": "name who",
    r"wholly": "completely",
    r"mend(s|ed|ing|able)?": "fix",
    r"told|said|unsaid": "given, reported, printed, stated",
    r"(has|have|had) of": "name the shard, slice or share",
    r"(the|a) faces? of": "the interface of",
    r"for want of": "without",
    r"lest": "so that ... not",
}
"""Words that made readers read a sentence twice -> plain words."""
RAISES = re.compile(r"\w+(, \w+)*: \S")
SECTIONS = ("Args:", "Attributes:", "Raises:")
DESCRIBED = re.compile(r"[\w*./`]+(, [\w*./`]+)*: (?P<start>\w+)")
"""An entry of a section: names, and the first word of their description."""
DTYPES = re.compile(r"(u?int|float|fp|bf|bool)\d*")


def broken_markup(root: Path) -> list[str]:
    """Return lines with double backticks or roles, because names have single backticks."""
    return [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in sources(root, *PRODUCT)
        for number, line in prose(path)
        if MARKUP.search(line)
    ]


def broken_raises(root: Path) -> list[str]:
    """Return errors that are not described as `Name: when` in a section `Raises:`."""
    return [
        f"{path.relative_to(root)}:{each.lineno + offset}: {why}"
        for path in sources(root, *PRODUCT)
        for each in docstrings(parsed(path))
        for offset, why in raises_faults(each.value)
    ]


def raises_faults(docstring: str) -> Iterator[tuple[int, str]]:
    """Yield (line offset, what is wrong) for each mention of an error in the wrong style."""
    lines = docstring.splitlines()
    section: int | None = None  # indentation of the header while inside a section `Raises:`
    for offset, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if line.strip() == "Raises:":
            section = indent
            if not "".join(lines[offset + 1 : offset + 2]).strip():
                yield offset, "`Raises:` without entries"
        elif section is not None and line.strip() and indent <= section:
            section = None
        elif section is not None and indent == section + 4 and not RAISES.match(line.strip()):
            yield offset, f"not `Name: when`: {line.strip()}"
        if re.search(r"\bRaises `?[A-Z]\w+", line) or re.search(r"\bRaises: \S", line):
            yield offset, f"needs a section `Raises:`: {line.strip()}"


def uncapitalised(root: Path) -> list[str]:
    """Return entries of `SECTIONS` whose description starts with a small letter.

    A description may start with a dtype, as in `lengths: int64 [n]`.
    """
    found = []
    for path in sources(root, *PRODUCT):
        for each in docstrings(parsed(path)):
            section: int | None = None  # indentation of the header while inside a section
            for number, line in enumerate(each.value.splitlines(), each.lineno):
                indent = len(line) - len(line.lstrip())
                if line.strip() in SECTIONS:
                    section = indent
                elif section is not None and line.strip() and indent <= section:
                    section = None
                elif section is not None and indent == section + 4:
                    entry = DESCRIBED.match(line.strip())
                    word = entry["start"] if entry else ""
                    if word[:1].islower() and not DTYPES.fullmatch(word):
                        found.append(f"{path.relative_to(root)}:{number}: {line.strip()}")
    return found


def unclear_words(root: Path) -> list[str]:
    """Return uses of `WORDS` in the product's prose and in the pages."""
    pattern = re.compile("|".join(rf"(?P<w{i}>\b({each})\b)" for i, each in enumerate(WORDS)), re.I)
    plain = list(WORDS.values())
    lines = [(path, *each) for path in sources(root, *PRODUCT) for each in prose(path)]
    for path in sources(root, suffix=".md"):
        if "fixtures" not in path.parts:
            text = path.read_text(encoding="utf-8")
            lines += [(path, number, line) for number, line in enumerate(text.splitlines(), 1)]
    return [
        f"{path.relative_to(root)}:{number}: {found[0]} -> {plain[int(found.lastgroup[1:])]}"
        for path, number, line in lines
        for found in pattern.finditer(line)
        if found.lastgroup
    ]


RULES = [broken_markup, broken_raises, uncapitalised, unclear_words]


@pytest.mark.parametrize("rule", RULES)
def test_the_text_keeps_the_rule(repo_root, rule):
    found = rule(repo_root)
    assert not found, f"{len(found)} places\n" + "\n".join(found)


BROKEN = [
    (broken_markup, 'def f():\n    """See ``x``."""', "a.py:2: See ``x``."),
    (broken_markup, "x = 1  # see :class:`X`", "a.py:1"),
    (broken_markup, 'X = 1\n"""A :func:`x`."""', "a.py:2"),
    (broken_markup, 'raise ValueError("``x`` is wrong")', "a.py:1"),
    (broken_raises, '"""Read. Raises ValueError if empty."""', "needs a section"),
    (broken_raises, '"""Read.\n\nRaises: ValueError if empty.\n"""', "a.py:3: needs a section"),
    (broken_raises, '"""Read.\n\nRaises:\n"""', "a.py:3: `Raises:` without entries"),
    (
        broken_raises,
        '"""Read.\n\nRaises:\n    A: empty.\n    or full.\n"""',
        "a.py:5: not `Name: when`: or full.",
    ),
    (uncapitalised, '"""Read.\n\nArgs:\n    x: the text.\n"""', "a.py:4: x: the text."),
    (uncapitalised, '"""Read.\n\nAttributes:\n    x, *y: a text.\n"""', "a.py:4: x, *y: a"),
    (uncapitalised, '"""Read.\n\nRaises:\n    A: if empty.\n"""', "a.py:4: A: if empty."),
    (unclear_words, '"""It begins anew."""', "anew -> again"),
    (unclear_words, "# Mended here", "Mended -> fix"),
    (unclear_words, 'def f(x):\n    raise E(f"{x} are alike")', "a.py:2: alike"),
]
ALLOWED = [
    (broken_markup, '"""See `x`."""\ny = "``"\n'),
    (
        broken_raises,
        '"""Read.\n\nRaises:\n    A, B: empty\n        or full.\n    C: no.\n\nEnd.\n"""',
    ),
    (
        uncapitalised,
        '"""Read.\n\nArgs:\n    x: int64 [n]\n        y: more.\n    z: A text: x.\n\nso: it is."""',
    ),
    (unclear_words, '"""A recommendation, renewed."""\nalike = "anew"'),
]


@pytest.mark.parametrize("rule, text, why", BROKEN)
def test_a_rule_sees_its_violation(tmp_path, rule, text, why):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "a.py").write_text(text)
    found = rule(tmp_path)
    assert len(found) == 1 and found[0].startswith("tools/a.py:") and why in found[0], found


@pytest.mark.parametrize("rule, text", ALLOWED)
def test_a_rule_lets_the_rest_be(tmp_path, rule, text):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "a.py").write_text(text)
    assert rule(tmp_path) == []


def test_pages_are_read_for_words_too(tmp_path):
    (tmp_path / "README.md").write_text("All\nalike.\n")
    assert unclear_words(tmp_path) == ["README.md:2: alike -> the same way, equally"]
