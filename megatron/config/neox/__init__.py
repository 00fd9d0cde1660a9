"""GPT-NeoX's configuration dialect as tables: spellings, refused keys, keys without effect."""
