import sys

import pytest
import transformers


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    """Let transformers copy the code of exports to this test's folder."""
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
