"""Measure the times and sizes that the documentation states. Each file is a command or a part."""
