"""The benchmark of the sample index and of reading, on little data and without published code."""

import csv
import sys

from benchmarks import samples


def test_both_tasks_are_measured_and_written(tmp_path, monkeypatch, capsys):
    sizes = {"documents": 300, "tokens": 200_000, "read-tokens": 60_000, "batch": 4, "batches": 25}
    flags = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    out = str(tmp_path / "out")
    monkeypatch.setattr(sys, "argv", ["samples.py", *flags, "--rounds", "2", "--out", out])
    samples.main()
    with open(f"{out}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    tasks = [(task, code) for task in ("sample index", "reading") for code in samples.SIDES[:2]]
    assert [(row["task"], row["code"]) for row in rows] == tasks
    assert all(float(row["samples_per_s"]) > 0 for row in rows)
    text = (tmp_path / "out.md").read_text()
    assert text == capsys.readouterr().out and "results equal bit by bit" in text
    assert (tmp_path / "out.png").stat().st_size > 1000
