"""Repetition, dropout and launches of the fused passes in Triton's interpreter."""

from tests.kernels.repeatable import RepeatableCases


class TestRepeatable(RepeatableCases):
    pass
