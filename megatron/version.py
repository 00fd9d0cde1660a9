"""Define the version of the project. Checkpoints and the Python package record it."""

import hashlib
from pathlib import Path

__version__ = "0.1.0"


def fingerprint() -> str:
    """Return a fingerprint (short hash) of the code that trains and evaluates.

    Tables of results contain the fingerprint.
    """
    found, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted([*(root / "megatron").rglob("*.py"), *root.glob("train.py")]):
        found.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]
