"""Triton's interpreter runs faster in these tests."""

from tests.helpers.interpreter import patch_once_per_launch  # noqa: F401
