"""The log of a run: its metrics, and what shows them."""
