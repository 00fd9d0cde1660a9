"""Translate GPT-NeoX's config keys into fields of the schema, by tables of all known keys."""
