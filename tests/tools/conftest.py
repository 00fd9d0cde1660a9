"""Return the committed parity cases, and start cells of a sweep quickly."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.launch import start_script
from tools.experiments import runner


@pytest.fixture(scope="session")
def cases(fixtures) -> Path:
    return fixtures / "parity"


class Forked:
    """A cell's process without the seconds that its imports take, used like a Popen."""

    def __init__(self, command, log, environ):
        self.process = start_script(command[1:], log.fileno(), cwd=Path.cwd(), environ=environ)

    returncode = property(lambda self: self.process.exitcode)

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.process.kill()


@pytest.fixture
def start_forked() -> Iterator[type[Forked]]:
    """Return a replacement for `runner.start`; afterwards, restore the handlers of signals."""
    before = {number: signal.getsignal(number) for number in runner.SIGNALS}
    yield Forked
    for number, handler in before.items():
        signal.signal(number, handler)
