"""Data preparation: text files in, token shards out."""
