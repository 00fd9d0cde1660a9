"""Tests for a machine with a GPU, torch, triton and pytest; no DeepSpeed needed but where it says.

    python -m pytest -m gpu

Inputs and comparisons are those of ``tests/kernels``, which run on the GPU where there is one.
"""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """A test starts with the memory that the one before had, and with nothing compiled by dynamo,
    which gives up compiling after a few variants of one function."""
    if torch.cuda.is_available():
        torch._dynamo.reset()
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
