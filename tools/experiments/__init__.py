"""Run grids of training runs, test claims about them, and write tables and a report."""
