"""Run one step of a job as each of its ranks, without real communication between the ranks.

The collectives and messages that the ranks would exchange are recorded and compared.
"""
