"""The version that checkpoints record and packages are built with."""

__version__ = "0.1.0"
