"""The first half hour on a GPU: see `tools/gpu_trial.py`."""
