"""Run one step of a job on many imagined ranks, and match what they communicate."""
