"""Define the version of the project, which checkpoints and the Python package record."""

__version__ = "0.1.0"
