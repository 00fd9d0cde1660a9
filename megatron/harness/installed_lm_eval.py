"""Import lm-evaluation-harness and its packages, although two of our commands have their names.

`python tools/lm_eval.py` puts tools/ at the start of Python's import path, so `import lm_eval`
would import the command itself. In the root of the checkout, `import evaluate` would import our
`evaluate.py` instead of the package `evaluate`, from which the harness takes metrics.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from megatron.data.errors import DataError
from megatron.shipped import ROOT

NAMES = ("lm_eval", "evaluate")
_OWN = (ROOT, ROOT / "tools")


@contextmanager
def harness_packages() -> Iterator[None]:
    """Let `import lm_eval` and `import evaluate` find the installed packages in the `with` block.

    Raises:
        DataError: One of the packages is not installed.
    """
    own = {name: sys.modules.pop(name) for name in NAMES if _is_own(sys.modules.get(name))}
    # `datasets` would report each data set that it opens, even one on this disk, to a server.
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    before = [*sys.path]
    sys.path.sort(key=lambda folder: Path(folder).resolve() in _OWN)  # those of commands, last
    try:
        for name in NAMES:
            if not (found := find_spec(name)) or Path(str(found.origin)).parent in _OWN:
                text = f"lm-evaluation-harness is not installed (no package {name})"
                raise DataError(f"{text}; run pip install -r requirements-hub.txt")
        yield
    finally:
        sys.path[:] = before
        sys.modules.update(own)


def _is_own(module: object) -> bool:
    """Return whether an imported module is one of this project's commands."""
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve().parent in _OWN
