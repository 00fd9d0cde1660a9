"""The progress bar of prepare_data.py shows one rate, and the time left."""

from __future__ import annotations

import re

from megatron.data.prepare.progress import progress_bar


def test_a_bar_has_one_rate(capsys):
    with progress_bar(10_000, "texts") as show:
        show(4_000)  # what an earlier run did
        show(6_000)
        show(99_000)
    last = capsys.readouterr().err.rpartition("\r")[2]
    assert re.fullmatch(r"texts \|█+\| 10\.0kB/10\.0kB \| \S+B/s \| ETA 00:00\n", last)


def test_without_a_size_it_counts(capsys):
    with progress_bar(0, "texts") as show:
        show(4_000)
        show(6_000)
    assert re.search(r"texts: 4\.00kB \[00:00, \S*B/s\]", capsys.readouterr().err)
