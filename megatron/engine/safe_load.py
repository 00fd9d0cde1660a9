"""Load checkpoint files from untrusted sources without running code that they contain.

A pickle file can name any Python function and have it called when the file is loaded.
`torch.load(weights_only=True)` refuses every function and class that is not on torch's own list.
This module adds only the numpy functions and classes that store the random state in the
`mp_rank_*` file of a published (GPT-NeoX) checkpoint.
"""

from __future__ import annotations

import _codecs
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.engine.errors import CheckpointError

_RECONSTRUCT = np.zeros(1).__reduce__()[0]
_SCALAR = np.float64(0).__reduce__()[0]
_NUMPY = [
    np.ndarray,
    np.dtype,
    *(type(np.dtype(code)) for code in ("u1", "u4", "u8", "i4", "i8", "f4", "f8")),
    _codecs.encode,  # how protocol 2 writes an array's bytes
    *(  # under the names that numpy 1 and numpy 2 write
        (function, f"numpy.{core}.multiarray.{name}")
        for function, name in ((_RECONSTRUCT, "_reconstruct"), (_SCALAR, "scalar"))
        for core in ("core", "_core")
    ),
]


def safe_load(path: Path) -> Any:
    """Load a `torch.save` file into CPU memory, without running code that the file contains.

    The tensors are memory-mapped unless the file was written by torch before 1.6.

    Raises:
        CheckpointError: the file cannot be read, or it contains more than tensors and plain values.
    """
    try:
        with torch.serialization.safe_globals(_NUMPY):
            mapped = zipfile.is_zipfile(path)  # torch < 1.6 did not write zip archives
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (
        pickle.UnpicklingError, OSError, RuntimeError, EOFError, KeyError, ValueError
    ) as error:  # fmt: skip
        raise CheckpointError(f"{path}: {_why_not_loaded(error)}") from error


def _why_not_loaded(error: Exception) -> str:
    if not isinstance(error, pickle.UnpicklingError):
        return f"cannot be read ({error})"
    name = re.search(r"GLOBAL ([\w.]+)", str(error))
    content = (
        f"asks for {name[1]}, which no checkpoint needs"
        if name
        else "holds more than tensors and plain values"
    )
    return (
        f"{content}; refused, and nothing in it was run. Fetch the file again, from a source that "
        "you trust"
    )
