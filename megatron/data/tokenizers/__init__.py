"""Tokenizers: the interface, GPT-2's byte-level BPE, SentencePiece."""
