"""Measure the time of the host for work of the GPU. Each file is a command."""
