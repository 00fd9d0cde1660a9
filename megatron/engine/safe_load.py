"""Load checkpoint files from untrusted sources without running code that they contain.

A pickle file can name any Python function and have it called when the file is loaded.
`torch.load(weights_only=True)` refuses every function and class that is not on torch's own list.
This module adds only the functions and classes that checkpoints need:

- functions and classes of numpy, for the random state in the `mp_rank_*` file of a published
  (GPT-NeoX) checkpoint;
- classes of DeepSpeed, for its `*_optim_states.pt` files. These classes contain plain values, and
  loading them runs no method. The classes are allowed only while DeepSpeed reads a checkpoint.

DeepSpeed itself calls `torch.load(weights_only=False)`. Therefore, every call of DeepSpeed that
reads a checkpoint must be inside a block `with only_safe_loads()`.
"""

import _codecs
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

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
_PATH = re.compile(r"[/\0]|^\.\.?$")
_TORCH_LOAD = torch.load
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def safe_load(path: Path, *, mmap: bool = True) -> Any:
    """Load a `torch.save` file into CPU memory, without running code that the file contains.

    Args:
        mmap: Whether to memory-map the tensors of the file.

    Raises:
        CheckpointError: The file cannot be read, or it contains more than tensors and plain values.
    """
    # Files of torch versions before 1.6 are never mapped.
    return _load(path, "cpu", mmap=mmap)


@contextmanager
def only_safe_loads() -> Iterator[None]:
    """Make every `torch.load` in the `with` block refuse to run code from files."""
    # It then is as safe as `safe_load`, in DeepSpeed and in new processes, too. These inherit an
    # environment variable that torch reads.
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils import fragment_address

    plain = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]
    with (
        torch.serialization.safe_globals([*plain, (_enum_member, "builtins.getattr")]),
        mock.patch.object(torch, "load", _load),
    ):
        before = os.environ.get(_FORCE)
        os.environ[_FORCE] = "1"
        try:
            yield
        finally:  # `patch.dict` would clear all variables for a moment, which other threads read
            if before is None:
                del os.environ[_FORCE]
            else:
                os.environ[_FORCE] = before


def _enum_member(cls: type[Enum], name: str) -> Enum:
    """Return the member `name` of the enumeration `cls`.

    Raises:
        UnpicklingError: `cls` is no enumeration.
    """
    # Pickles that Python before 3.11.4 has written call `getattr`, which this function replaces.
    if not (isinstance(cls, type) and issubclass(cls, Enum)):
        raise pickle.UnpicklingError(f"GLOBAL getattr of {cls!r}")
    return cls[name]


def _load(file: Any, map_location: Any = None, *, mmap: bool = False, **_ignored: Any) -> Any:
    """Call `torch.load` with `weights_only=True`, whatever value the caller passes."""
    path = Path(file).resolve()
    try:
        if path.exists() and not path.is_file():  # opening a named pipe would wait for ever
            raise OSError("not a regular file")
        with torch.serialization.safe_globals(_NUMPY):
            mapped = mmap and zipfile.is_zipfile(path)
            content = _TORCH_LOAD(path, map_location=map_location, weights_only=True, mmap=mapped)
        _require_plain_keys(content)
        return content
    except Exception as error:  # foreign bytes raise errors of any type in the unpickler
        raise CheckpointError(f"{path}: {_why_not_loaded(error)}") from error


def _require_plain_keys(content: Any) -> None:
    """Check that no key of a dictionary in `content` is a path.

    Raises:
        ValueError: A key contains a slash or a null character, or is `.` or `..`.
    """
    # DeepSpeed's converter uses keys as folder names.
    waiting, seen = [content], set()
    while waiting:
        value = waiting.pop()
        if id(value) in seen or not isinstance(value, dict | list | tuple):
            continue
        seen.add(id(value))  # objects may contain themselves, or each other many times
        if isinstance(value, dict):
            if paths := [key for key in value if isinstance(key, str) and _PATH.search(key)]:
                raise ValueError(f"the name {paths[0]!r} is a path")
            value = value.values()
        waiting.extend(value)


def _why_not_loaded(error: Exception) -> str:
    if not isinstance(error, pickle.UnpicklingError):
        return f"cannot be read ({str(error) or type(error).__name__})"
    content = "holds more than tensors and plain values"
    if name := re.search(r"GLOBAL ([\w.]+)", str(error)):
        content = f"asks for {name[1]}, which no checkpoint needs"
    return (
        f"{content}; refused, and nothing in it was run. Fetch the file again, from a source that "
        "you trust"
    )
