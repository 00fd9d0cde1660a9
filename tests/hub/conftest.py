import resource
import sys
from contextlib import contextmanager

import pytest
import transformers


@pytest.fixture(autouse=True)
def own_modules(tmp_path, monkeypatch):
    """Let transformers copy the code of exports to this test's folder."""
    modules = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def full_disk():
    """Return a context in which no file of this process can have more than some bytes."""

    @contextmanager
    def limited(most):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited
