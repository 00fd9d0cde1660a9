"""Return the committed parity cases."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cases(fixtures) -> Path:
    return fixtures / "parity"
