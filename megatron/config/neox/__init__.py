"""Translate GPT-NeoX's config keys into fields of `config/schema.py`, and list the known keys."""
