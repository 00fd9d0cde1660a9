"""Run lm-evaluation-harness on the model of a run folder.

The libraries in requirements-hub.txt must be installed.
"""
