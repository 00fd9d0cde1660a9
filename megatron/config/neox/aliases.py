"""Names of positional embeddings: the files of ``megatron/positional`` and the published aliases.

The file name is the registry, so the canonical names are read from the directory, without importing
anything. One table maps the names the published code used to a file and its options.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from megatron.config.errors import did_you_mean

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "kerple_power_ap_": ("kerple_power", {}),
    "kerple_power__ap": ("kerple_power_mul", {}),
    "kerple_power_ap_ap": ("kerple_power_add_mul", {}),
}

# Files of the directory that are not an embedding.
_NOT_EMBEDDINGS = {"__init__", "base"}


@cache
def positional_names() -> tuple[str, ...]:
    """Canonical names, sorted: every ``megatron/positional/NAME.py``."""
    directory = Path(__file__).resolve().parents[2] / "positional"
    files = {path.stem for path in directory.glob("*.py")}
    return tuple(sorted(name for name in files - _NOT_EMBEDDINGS if not name.startswith("_")))


def resolve(name: Any) -> tuple[str, dict[str, Any]]:
    """(canonical name, options) of a canonical or published name; ValueError names the nearest."""
    names = positional_names()
    if not isinstance(name, str):
        raise ValueError(f"expected the name of an embedding, got {name}; write e.g. kerple_log")
    folded = name.lower()
    if folded in PUBLISHED:
        canonical, options = PUBLISHED[folded]
        return canonical, dict(options)
    if folded in names:
        return folded, {}
    hint = did_you_mean(name, [*names, *PUBLISHED], "write one of " + ", ".join(names))
    raise ValueError(f"no positional embedding is called {name!r}; {hint}")
