"""Return the committed parity cases, and start cells of a sweep quickly."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launch import Forked
from tools.experiments import runner


@pytest.fixture(scope="session")
def cases(fixtures) -> Path:
    return fixtures / "parity"


@pytest.fixture
def start_forked() -> Iterator[type[Forked]]:
    """Return a replacement for `runner.start`; afterwards, restore the handlers of signals."""
    before = {number: signal.getsignal(number) for number in runner.SIGNALS}
    yield Forked
    for number, handler in before.items():
        signal.signal(number, handler)
