"""Run the tests of repetition, dropout and launches in Triton's interpreter."""

from tests.kernels.repeatable import RepeatableCases


class TestRepeatable(RepeatableCases):
    pass
