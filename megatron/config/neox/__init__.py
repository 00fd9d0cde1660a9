"""GPT-NeoX's dialect: tables of its keys, and their translation into the schema's fields."""
