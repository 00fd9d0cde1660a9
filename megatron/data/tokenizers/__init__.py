"""Tokenizers for UTF-8 bytes, GPT-2's BPE, tokenizer.json files and SentencePiece models."""
