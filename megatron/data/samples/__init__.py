"""Define the order of training samples, and load batches of samples from token shards."""
