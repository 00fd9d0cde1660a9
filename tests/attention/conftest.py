"""Make Triton's interpreter faster for the tests in this folder."""

from tests.helpers.interpreter import fast_interpreter  # noqa: F401
