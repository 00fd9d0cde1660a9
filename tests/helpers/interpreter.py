"""Make Triton's interpreter faster. It computes and checks the same.

At each call of a device function, the interpreter replaces the functions of `triton.language`
again, although the launch has already replaced them. It checks each whole number for an overflow
with ten operations of Triton. Both together take two thirds of the time of the tests.

For each value it also makes new objects for the type and the shape. Before each operation it
looks up how to convert both values, though most have the same dtype. It also copies each to their
common shape, though numpy broadcasts in the operation. Together these take half of the rest.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest

OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
UNCONVERTED = ("fp32", "int1", "int32", "int64")
"""If both values of an operation have the same one of these dtypes, Triton converts neither."""


@pytest.fixture(autouse=True, scope="session")
def fast_interpreter():
    """Speed up Triton's interpreter in all tests."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    done: set[frozenset[int]] = set()
    types: dict[tuple[int, int], Any] = {}
    modules = (interpreter.tl, interpreter.tl.core)
    launch, replace_functions = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def first_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        types.clear()  # each launch has new types of pointers
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
        _convert_less(patch, TritonSemantic, interpreter.tl.core.block_type, types)
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


def _convert_less(
    patch: pytest.MonkeyPatch, semantic: Any, block_type: Any, known: dict[tuple[int, int], Any]
) -> None:
    """Skip conversions of two values of one dtype, and leave broadcasting to numpy.

    Args:
        known: For the ids of two types: both types, and these types after broadcasting.
    """
    convert, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    constants: dict[Any, Any] = {}

    def constant(self: Any, value: Any, other: Any) -> Any:
        dtype = other.type.scalar
        small = not isinstance(value, int) or abs(value) < 2**31
        whole = type(value) is int and dtype.name in ("int32", "int64")
        if not (small and (whole or (dtype.name == "fp32" and isinstance(value, int | float)))):
            return value
        key = (value, dtype.name)
        if key not in constants:
            constants[key] = self.scalar_constant(value, dtype)
        return constants[key]

    def binary_op_type_checking_impl(self: Any, lhs: Any, rhs: Any, *args: Any, **kw: Any) -> Any:
        if isinstance(lhs, self.tensor):
            if not isinstance(rhs, self.tensor):
                rhs = constant(self, rhs, lhs)
        elif isinstance(rhs, self.tensor):
            lhs = constant(self, lhs, rhs)
        if not (isinstance(lhs, self.tensor) and isinstance(rhs, self.tensor)):
            return convert(self, lhs, rhs, *args, **kw)
        a, b = lhs.type, rhs.type
        key = (id(a), id(b))
        if key not in known:
            # holds both types, so that no other object gets their ids
            known[key] = a, b, *_broadcast_types(a, b, block_type)
        *_, wide_a, wide_b = known[key]
        if wide_a is None:
            return convert(self, lhs, rhs, *args, **kw)
        lhs = lhs if wide_a is a else self.tensor(lhs.handle, wide_a)
        rhs = rhs if wide_b is b else self.tensor(rhs.handle, wide_b)
        return lhs, rhs

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape == b.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    patch.setattr(semantic, "binary_op_type_checking_impl", binary_op_type_checking_impl)
    patch.setattr(semantic, "broadcast_impl_value", broadcast_impl_value)


def _broadcast_types(a: Any, b: Any, block_type: Any) -> tuple[Any, Any]:
    """Return the types of two values after broadcasting.

    The result is (None, None) if Triton's own function must convert the values or add dimensions.
    """
    names = a.scalar.name, b.scalar.name
    pointer = a.scalar.is_ptr() and names[1] in ("int32", "int64")
    if not pointer and (names[0] != names[1] or names[0] not in UNCONVERTED):
        return None, None
    shapes = [[*each.shape] if each.is_block() else [] for each in (a, b)]
    if not any(shapes):
        return a, b
    if all(shapes) and len(shapes[0]) != len(shapes[1]):
        return None, None
    wide = np.broadcast_shapes(*shapes)
    return tuple(
        each if shape == [*wide] else block_type(each.scalar, [*wide])
        for each, shape in zip((a, b), shapes, strict=True)
    )


def _dtype_of(look_up: Any, known: dict[str, np.dtype], dtype: Any) -> np.dtype:
    name = dtype.scalar.name
    if name not in known:
        known[name] = look_up(dtype)
    return known[name]
