"""Measure whether a model uses its long context: `python evaluate.py ... --suite`."""
