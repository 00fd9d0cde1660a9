"""The parity cases: published numbers, recomputed by this project's own model, engine and data."""
