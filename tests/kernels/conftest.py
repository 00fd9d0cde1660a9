"""Make Triton's interpreter faster for the tests in this folder."""

from tests.helpers.interpreter import patch_once_per_launch  # noqa: F401
