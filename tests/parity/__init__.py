"""The cases of `tools/check_parity.py`: our numbers, and those of the published KERPLE code."""
