"""Run grids of training runs, test what they show, and write tables and a report of the results."""
