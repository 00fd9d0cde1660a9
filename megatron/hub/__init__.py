"""Export models to Hugging Face's `transformers`, and import models from `transformers`.

The package `transformers` is optional.
"""
