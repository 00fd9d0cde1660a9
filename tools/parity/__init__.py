"""Check parity cases: recompute published numbers with this project's code, and compare them."""
