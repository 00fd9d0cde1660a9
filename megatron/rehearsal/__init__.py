"""Run one step of a job on many imagined ranks, and check that their communication fits together."""
