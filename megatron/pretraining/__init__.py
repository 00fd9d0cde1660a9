"""Run a pretraining job: build the model that a config describes, train, save and evaluate it."""
