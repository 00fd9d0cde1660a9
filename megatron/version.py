"""Define the project's version, which checkpoints record and the Python package carries."""

__version__ = "0.1.0"
