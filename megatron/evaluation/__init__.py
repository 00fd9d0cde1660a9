"""Evaluate models: held-out losses, perplexity by sequence length, and reports of the results."""
