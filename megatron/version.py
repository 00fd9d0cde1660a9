"""Define the version of the project. Checkpoints and the Python package record it."""

__version__ = "0.1.0"
