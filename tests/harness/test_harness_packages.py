"""Test that imports for lm-evaluation-harness do not find this project's commands."""

import importlib.util
import sys
from pathlib import Path

import pytest

from megatron.data.errors import DataError
from megatron.harness.installed_lm_eval import harness_packages
from tests.helpers.paths import ROOT


def test_imports_mean_the_installed_packages(monkeypatch):
    for name in ("lm_eval", "evaluate"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.syspath_prepend(ROOT / "tools")
    for name in ("lm_eval", "evaluate"):
        found = importlib.util.find_spec(name)
        assert Path(found.origin).parent in (ROOT, ROOT / "tools")
        with harness_packages():
            found = importlib.util.find_spec(name)
            assert Path(found.origin).name == "__init__.py"
    own = importlib.import_module("evaluate")
    with harness_packages():
        assert "evaluate" not in sys.modules
    assert sys.modules["evaluate"] is own
    monkeypatch.setattr(sys, "path", [str(ROOT), str(ROOT / "tools")])
    with pytest.raises(DataError, match="pip install -r requirements-hub.txt"), harness_packages():
        pass
