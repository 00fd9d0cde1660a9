"""The engine's errors. Each message says what is wrong, where, and what to write instead."""

from __future__ import annotations


class StartError(Exception):
    """The job cannot be joined as the config asks, or its ranks do not agree."""


class CheckpointError(Exception):
    """A checkpoint cannot be read or written, or does not fit this run."""


class DivergedError(Exception):
    """The loss or a weight is no longer a finite number, or fp16 cannot represent the gradients."""


class RunLogError(RuntimeError):
    """Weights & Biases could not be started."""
