"""Log a run: write its metrics, and show them on the console, in TensorBoard and in wandb."""
