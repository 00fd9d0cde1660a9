"""Find NVIDIA's apex, an optional library of fused kernels that is built from source.

docs/gpu.md explains how to build apex. Each job decides at its start whether to use apex, and logs
the decision.
"""

import importlib
from typing import Any

import torch


def find(module: str, name: str, extension: str) -> tuple[Any, str]:
    """Find a class or function of NVIDIA's apex, or return the reason why it cannot be used.

    Args:
        module: The module of apex, such as `apex.optimizers`.
        name: The name of the class or function in that module.
        extension: The CUDA extension that the class or function needs, such as `amp_C`.

    Returns:
        (class or function, ""), or (None, reason).
    """
    # The package `apex` on PyPI is not NVIDIA's. Only NVIDIA's has `apex.optimizers.FusedAdam`. A
    # build of apex may lack the extension.
    if not torch.cuda.is_available():
        return None, "there is no GPU"
    try:
        found = importlib.import_module("apex.optimizers").FusedAdam
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the import of another package of this name may fail in any way
        if isinstance(error, ModuleNotFoundError) and error.name == "apex":
            return None, "apex is not installed"
        return None, "the installed package `apex` is not NVIDIA's"
    try:
        importlib.import_module(extension)
    except ImportError:
        return None, f"apex was built without its CUDA extension {extension}"
    return found, ""
