"""Save checkpoints, resume from them in any layout, and exchange checkpoints with GPT-NeoX."""
