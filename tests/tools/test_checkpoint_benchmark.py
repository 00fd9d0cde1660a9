"""The benchmark of saving runs, on a tiny model, and prints the times of both ways."""

import re

from tests.helpers.launch import call


def test_both_ways_are_measured(tmp_path):
    shape = ["--layers", 1, "--width", 8, "--heads", 2, "--saves", 2, "--folder", tmp_path]
    text = call("benchmarks/checkpoint.py", *shape)
    assert len(re.findall(r"  saved \S+False/global_step\d, training waited ", text)) == 2
    assert len(re.findall(r"  saving \S+True/global_step\d, training waited ", text)) == 2
    assert len(re.findall(r"  saved \S+True/global_step\d, written beside training", text)) == 2
    assert not list(tmp_path.iterdir())
