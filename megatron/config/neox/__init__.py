"""Translate GPT-NeoX's config keys into fields of `config/schema.py`, with tables of known keys."""
