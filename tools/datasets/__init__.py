"""GPT-NeoX's command for tokenising text, under GPT-NeoX's path."""
