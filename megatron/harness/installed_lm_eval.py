"""Import the packages lm_eval and evaluate, although two of our commands have the same names.

`lm_eval` is lm-evaluation-harness. `python tools/lm_eval.py` puts tools/ at the start of Python's
import path, so `import lm_eval` would import the command itself. In the root of the checkout,
`import evaluate` would import our `evaluate.py` instead of the package `evaluate`, which computes
metrics for the harness.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

from megatron.data.errors import DataError
from megatron.shipped import ROOT

NAMES = ("lm_eval", "evaluate")
_OWN = (ROOT, ROOT / "tools")


class _Elsewhere:
    """An import finder that finds the installed packages lm_eval and evaluate."""

    # It ignores the folder of our commands, which have the same names.

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in NAMES:
            return None
        folders = [each for each in sys.path if Path(each).resolve() not in _OWN]
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, folders) for finder in others)
        spec = next((each for each in found if each), None)
        if spec is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return spec


@contextmanager
def harness_packages() -> Iterator[None]:
    """Let `import lm_eval` and `import evaluate` find the installed packages in the `with` block.

    Raises:
        DataError: The package lm_eval is not installed.
    """
    own = {name: sys.modules.pop(name) for name in NAMES if _is_own(name)}
    # `datasets` would report each data set that it opens, even one on this disk, to a server.
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    finder = _Elsewhere()
    sys.meta_path.insert(0, finder)
    try:
        try:
            find_spec("lm_eval")
        except ModuleNotFoundError:
            text = "lm-evaluation-harness is not installed; run pip install -r requirements-hub.txt"
            raise DataError(text) from None
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(own)


def _is_own(name: str) -> bool:
    """Return whether the imported module `name` is one of this project's commands."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and Path(file).resolve().parent in _OWN
