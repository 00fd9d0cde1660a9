"""Tests for a machine with a GPU, torch, triton and pytest. Few of them also need DeepSpeed.

    python -m pytest -m gpu

Inputs, comparisons and some cases are those of `tests/kernels`, which use a GPU if there is one.
"""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Free each test's memory, and reset dynamo, which compiles few variants of a function."""
    if torch.cuda.is_available():
        torch._dynamo.reset()
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
