"""Corpora that users can request by name: where to download them, or how to build them."""
