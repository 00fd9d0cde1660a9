"""Data preparation: the code that reads text files and writes them as token shards."""
