"""Test the prompts that generate.py reads line by line."""

from __future__ import annotations

import io
import sys


def test_lines_are_continued_until_the_input_ends(run, call, monkeypatch):
    """Each line has the text that it has in a list of prompts, with its random numbers."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n\nab\r\nlast"))
    some = ("--load", run, "--max-new-tokens", 9)
    out, err = call(*some, "--interactive")
    assert err.count("> ") == 4 and err.count("9 new tokens") == 3
    prompts = [x for prompt in ("import os", "ab", "last") for x in ("--prompt", prompt)]
    assert out == call(*some, *prompts)[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert call(*some, "--interactive")[0] == ""
    assert "not allowed with" in call(*some, "--interactive", "--prompt", "a", code=2)[1]
