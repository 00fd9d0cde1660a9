"""The published (GPT-NeoX) checkpoint format: its layout, reading it, what its buffers hold."""
