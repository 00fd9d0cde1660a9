"""Evaluation: losses, perplexity by length, the published evaluation, reports."""
