"""Make Triton's interpreter faster. It computes and checks the same.

At each call of a device function, the interpreter replaces the functions of `triton.language`
again, although the launch has already replaced them. It checks each whole number for an overflow
with ten operations of Triton. Both together take two thirds of the time of the tests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


@pytest.fixture(autouse=True, scope="session")
def fast_interpreter():
    """Speed up Triton's interpreter in all tests."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    done: set[frozenset[int]] = set()
    modules = (interpreter.tl, interpreter.tl.core)
    launch, replace_functions = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def first_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        used = frozenset(id(m) for m in modules if m in self.fn.__globals__.values())
        if used not in done:
            replace_functions(self.fn)
            done.add(used)
        return self.rewrite()(*args, **kwargs)

    dtype_of = partial(_dtype_of, interpreter._get_np_dtype, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", first_launch)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", check_overflow)
        patch.setattr(interpreter, "_get_np_dtype", dtype_of)
        yield


def check_overflow(semantic: Any, lhs: Any, rhs: Any, operation: Any) -> None:
    """Assert that a sum, a difference or a product of whole numbers fits into their dtype."""
    dtype = lhs.type.scalar
    if dtype.int_bitwidth >= 64:
        return
    a, b = (x.handle.data.astype(np.int64) for x in (lhs, rhs))
    result = OPERATIONS[operation.__name__](a, b)
    low, high = dtype.get_int_min_value(), dtype.get_int_max_value()
    assert ((low <= result) & (result <= high)).all(), f"{dtype} overflow: {operation.__name__}"


def _dtype_of(look_up: Any, known: dict[str, np.dtype], dtype: Any) -> np.dtype:
    name = dtype.scalar.name
    if name not in known:
        known[name] = look_up(dtype)
    return known[name]
