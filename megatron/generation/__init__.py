"""Continue texts with a trained model."""
