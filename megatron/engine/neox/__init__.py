"""The published (GPT-NeoX) checkpoint format: its layout, reading it, the buffers it stores."""
