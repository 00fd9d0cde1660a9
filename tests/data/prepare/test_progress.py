"""The progress bar of prepare_data.py shows rates that agree with a count by hand."""

from __future__ import annotations

from types import SimpleNamespace

from megatron.data.prepare import progress
from megatron.data.prepare.progress import ProgressBar


def test_rates_are_those_of_this_run_alone(monkeypatch, capsys):
    seconds = iter([100.0, 104.0, 110.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    with ProgressBar(10_000, "texts") as bar:
        bar.show(4_000, {"documents": 300, "text_bytes": 7_000_000})  # what an earlier run did
        assert "documents/s" not in capsys.readouterr().err
        bar.show(6_000, {"documents": 500, "text_bytes": 9_000_000})
        bar.show(9_000, {"documents": 1_300, "text_bytes": 32_000_000})
    # In 10 s: 1,300 - 300 documents and 32 - 7 megabytes.
    assert "100 documents/s, 2.5 MB/s of text" in capsys.readouterr().err
