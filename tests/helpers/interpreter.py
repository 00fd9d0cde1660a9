"""Make Triton's interpreter faster. It computes and checks the same.

At each call of a device function, the interpreter replaces the functions of `triton.language`
again, although the launch has already replaced them. It checks each whole number for an overflow
with ten operations of Triton. Both together take two thirds of the time of the tests.

For each value it also makes new objects for the type and the shape. Before each operation it
broadcasts both values, even to the shape that they have. Together these take a third of the rest.
"""

from __future__ import annotations

from functools import cache, partial
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

    @cache
    def modules_of(function: Any) -> frozenset[int]:
        return frozenset(map(id, modules)) & frozenset(map(id, function.__globals__.values()))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        used = modules_of(self.fn)
        if used not in done:
            replace_functions(self.fn)
            done.add(used)
        return self.rewrite()(*args, **kwargs)

    dtype_of = partial(_dtype_of, interpreter._get_np_dtype, {})
    with pytest.MonkeyPatch.context() as patch:
        _keep_types(patch, interpreter.tl.core)
        _broadcast_less(patch, TritonSemantic)
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
    result = OPERATIONS[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
    low, high = dtype.get_int_min_value(), dtype.get_int_max_value()
    fits = low <= result.min() and result.max() <= high
    assert fits, f"{dtype} overflow: {operation.__name__}"


def _keep_types(patch: pytest.MonkeyPatch, core: Any) -> None:
    """Compute the attributes of a block's type once, and those of a value once for its type."""
    new_type, new_tensor = core.block_type.__init__, core.tensor.__init__

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        known = vars(element_ty).setdefault("of_blocks", {})
        key = (*shape, *map(type, shape))
        if key in known:
            vars(self).update(vars(known[key]))
        else:
            new_type(self, element_ty, shape)
            known[key] = self

    def tensor(self: Any, handle: Any, dtype: Any) -> None:
        if (kept := vars(dtype).get("of_tensors")) is None:
            new_tensor(self, handle, dtype)
            kept = dtype.of_tensors = {k: v for k, v in vars(self).items() if k != "handle"}
        self.handle = handle
        vars(self).update(kept)

    patch.setattr(core.block_type, "__init__", block_type)
    patch.setattr(core.tensor, "__init__", tensor)


def _broadcast_less(patch: pytest.MonkeyPatch, semantic: Any) -> None:
    """Broadcast two values only if their shapes differ."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape == b.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    patch.setattr(semantic, "broadcast_impl_value", broadcast_impl_value)


def _dtype_of(look_up: Any, known: dict[str, np.dtype], dtype: Any) -> np.dtype:
    name = dtype.scalar.name
    if name not in known:
        known[name] = look_up(dtype)
    return known[name]
