"""Let the tests of this folder import the scripts of docs/lab, which import one another."""

import pytest

from tests.helpers.paths import ROOT


@pytest.fixture(autouse=True)
def lab_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "lab")
