"""Training: optimizer, schedule, DeepSpeed engine, the loop, its log."""
