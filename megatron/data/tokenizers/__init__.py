"""Tokenizers: the interface, UTF-8 bytes, GPT-2's BPE, tokenizer.json files, SentencePiece."""
