"""Corpora known by name: where they come from, how they become shards."""
