"""Data: tokenizers, token shards, samples, data preparation, corpora."""
