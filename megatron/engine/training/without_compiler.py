"""Build torch's optimizers without importing torch's compiler, which takes 1.7 s in each process.

torch's methods exclude themselves from compiled graphs, and import the compiler for that. Here, no
compiled graph contains an optimizer.
"""

import functools
import inspect
from typing import Any, TypeVar

import torch

T = TypeVar("T", bound=type[torch.optim.Optimizer])


def without_compiler(optimizer: T) -> T:
    """Return a class of optimizers, whose methods do not import the compiler.

    The methods lose all decorators of torch. `differentiable=True` therefore has no effect.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods: dict[str, Any] = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    methods["step"] = torch.no_grad()(inspect.unwrap(optimizer.step))
    made: Any = type(optimizer.__name__, (optimizer,), methods)
    functools.update_wrapper(made, optimizer, updated=())  # its module and docstring
    return made
