"""Opening checkpoint files that anybody may have made: tensors and plain values, never code.

A pickle can name any function and have it called. `torch.load(weights_only=True)` refuses every
name that is not on its list; to that list comes what a published `mp_rank_*` file holds besides
(numpy's random state), and nothing else.
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

try:
    from numpy._core import multiarray
except ImportError:  # numpy 1
    from numpy.core import multiarray

_NUMPY = [
    np.ndarray,
    np.dtype,
    *(type(np.dtype(code)) for code in ("u1", "u4", "u8", "i4", "i8", "f4", "f8")),
    _codecs.encode,  # how protocol 2 writes an array's bytes
    *(  # under the names that numpy 1 and numpy 2 write
        (getattr(multiarray, function), f"numpy.{core}.multiarray.{function}")
        for function in ("_reconstruct", "scalar")
        for core in ("core", "_core")
    ),
]


def safe_load(path: Path) -> Any:
    """What `torch.save` wrote to `path`, on the CPU, mapped where possible; code is never run.

    Raises:
        CheckpointError: unreadable, or it asks for more than tensors and plain values.
    """
    try:
        with torch.serialization.safe_globals(_NUMPY):
            mapped = zipfile.is_zipfile(path)  # files of torch < 1.6 are none
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = (
            f"asks for {named[1]}, which no checkpoint needs"
            if named
            else "holds more than tensors and plain values"
        )
        raise CheckpointError(
            f"{path}: {what}; refused, and nothing in it was run. Fetch the file again, from a "
            "source that you trust"
        ) from error
    except (OSError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
