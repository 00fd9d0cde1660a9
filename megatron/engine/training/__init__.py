"""Train a model: optimizer, learning-rate schedule, DeepSpeed engine, training loop and log."""
