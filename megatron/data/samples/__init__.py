"""Training samples: the order of samples, data sets that read samples from shards, the loader."""
