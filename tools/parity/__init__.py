"""Check parity cases: compare this project's numbers with those of the published KERPLE code."""
