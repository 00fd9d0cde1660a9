"""Training samples: their order, the data sets that read them from shards, the loader."""
