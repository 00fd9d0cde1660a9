"""Test the documents that need recall: everything that is asked stands before."""

from __future__ import annotations

import json
import random

from tools.experiments import recall_text


def test_what_is_asked_stands_before():
    kinds = set()
    for seed in range(40):
        lines = recall_text.recall_document(random.Random(seed)).splitlines()
        kinds.add(lines[0].startswith("words"))
        if lines[0].startswith("words"):
            assert [line.partition(" = ")[2] for line in lines] == [lines[0][len("words = ") :]] * 2
            continue
        given, asked = lines[: len(lines) // 2], lines[len(lines) // 2 :]
        assert len(given) == len(asked) > 1
        assert {f"assert {line.replace(' = ', ' == ')}" for line in given} == set(asked)
    assert kinds == {True, False}


def test_the_same_seed_writes_the_same_documents(tmp_path):
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        out = str(tmp_path / name)
        assert recall_text.main(["--documents", "5", "--seed", seed, "--out", out]) == 0
    a, b, c = ((tmp_path / name).read_text() for name in "abc")
    assert a == b != c
    assert len([json.loads(line)["text"] for line in a.splitlines()]) == 5
