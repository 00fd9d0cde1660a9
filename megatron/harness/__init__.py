"""Run lm-evaluation-harness on the model of a run folder. Needs requirements-hub.txt."""
