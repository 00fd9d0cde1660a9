"""Checkpoints: saving, choosing, resuming, changing the layout, exchanging with GPT-NeoX."""
