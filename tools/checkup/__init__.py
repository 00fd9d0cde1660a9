"""The checks of `tools/doctor.py`."""
