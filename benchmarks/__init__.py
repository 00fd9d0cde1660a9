"""Measurements behind the documented figures; each file is a command or part of one."""
