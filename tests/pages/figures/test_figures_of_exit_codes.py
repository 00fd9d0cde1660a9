"""Test that the exit codes on the pages are those with which the programs end."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pandas as pd
import pytest

import train
from megatron import entry
from megatron.config.command_line import load_or_exit
from megatron.pretraining import readiness
from megatron.rehearsal.rehearse import RehearsalError
from tests.helpers.paths import CONFIGS, ROOT
from tests.pages.figures.held import grid, says, smallest
from tests.parity.result import Result
from tools import check_parity, doctor, sweep
from tools.checkup.finding import PROBLEM, Finding


@entry.reports
def fails(error: Exception) -> int:
    raise error


def test_the_code_of_an_error_and_of_a_mistake_in_the_config(capsys):
    with pytest.raises(SystemExit) as refused:
        load_or_exit(Namespace(hostfile="hosts"))
    failed, mistake = fails(OSError()), refused.value.code
    both = f"exit code is {failed}, or {mistake} if the mistake is in the"
    says("../ARCHITECTURE", both)
    both = f"is {mistake} for a configuration error, and {failed} for other errors"
    says("troubleshooting", both)
    says("cluster", f"ends with exit code {fails(RehearsalError())}. The error")


def test_the_codes_of_a_sweep(monkeypatch, capsys):
    codes, cell, given = [], grid("stand_in").cells[0], str(CONFIGS / "paper/length_tasks.yml")
    monkeypatch.setattr(sweep.signal, "signal", lambda *_: None)
    for state, failed, left in (("stale", [], []), ("new", [cell], []), ("new", [], [cell])):
        ended = SimpleNamespace(failed=failed, left=left, signals=[], receive=None, run=list)
        for name, value in (
            ("Runner", ended), ("state_of", (state, "")),
            ("write_index", pd.DataFrame({"state": [state]})),
        ):  # fmt: skip
            monkeypatch.setattr(sweep, name, lambda *_, value=value: value)
        codes.append(sweep.main([given, "--cell", "0"]))
    says("experiments", f"stale cells give exit code {codes[0]}.", f"is then {codes[1]}.")
    says("experiments", f"runs in another sweep, and ends with exit code {codes[2]}.")


def test_the_codes_of_checks(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda paths: [("disk", Finding(PROBLEM, "full"))])
    monkeypatch.setattr(readiness, "readiness", lambda config: [(True, "no text")])
    monkeypatch.setattr(train, "load_or_exit", lambda args, joins: smallest())
    wrong = Result("case", {"loss": (1.0, 0.0)})
    monkeypatch.setattr(check_parity, "cases", lambda args: [("case", lambda: wrong)])
    monkeypatch.setattr("sys.argv", ["train.py", "--check", str(CONFIGS / "quickstart.yml")])
    parity, checked = check_parity.main([str(ROOT)]), train.main()
    says("troubleshooting", f"exit code is {doctor.main([])} if there is a problem")
    says("training", f"disk space. If so, the exit code is {checked}.")
    says("moving_from_kerple", f"The exit code is {parity} if a case fails")
    says("../tools/README", f"exit code {parity} if one differs")
