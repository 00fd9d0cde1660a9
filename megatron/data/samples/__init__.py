"""Training samples: their order, the datasets that cut them out, the loader."""
