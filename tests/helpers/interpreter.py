"""Make Triton's interpreter faster.

At each call of a device function, the interpreter replaces the functions of `triton.language`
again, although the launch has already replaced them. This takes a third of the time of the tests.
"""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def patch_once_per_launch():
    """Replace the functions only once per launch and module, in all tests."""
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", first_launch)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield
