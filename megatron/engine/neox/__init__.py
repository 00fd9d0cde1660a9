"""Define and read the published (GPT-NeoX) checkpoint format, with the buffers that it stores."""
