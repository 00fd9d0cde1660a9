"""A pretraining job, from its config to a trained, saved and evaluated model."""
