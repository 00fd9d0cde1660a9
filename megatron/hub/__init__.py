"""Exchange models with Hugging Face's `transformers`, an optional package."""
