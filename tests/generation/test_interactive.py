"""Test the prompts that generate.py reads line by line."""

from __future__ import annotations

import io
import os
import sys

import pytest


@pytest.fixture(autouse=True)
def no_timeout(monkeypatch):
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "")  # so that its absence is restored afterwards
    monkeypatch.delenv("DEEPSPEED_TIMEOUT")


def test_lines_are_continued_until_the_input_ends(run, call, monkeypatch):
    """Each line has the text that it has in a list of prompts, with its random numbers."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n\nab\r\nlast"))
    some = ("--load", run, "--max-new-tokens", 9)
    out, err = call(*some, "--prompt", "a")
    assert "DEEPSPEED_TIMEOUT" not in os.environ
    out, err = call(*some, "--interactive")
    assert os.environ["DEEPSPEED_TIMEOUT"] == "10080"  # the minutes of a week
    assert err.count("> ") == 4 and err.count("9 new tokens") == 3
    prompts = [x for prompt in ("import os", "ab", "last") for x in ("--prompt", prompt)]
    assert out == call(*some, *prompts)[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert call(*some, "--interactive")[0] == ""
    assert "not allowed with" in call(*some, "--interactive", "--prompt", "a", code=2)[1]
