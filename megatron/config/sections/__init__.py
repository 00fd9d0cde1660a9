"""Define the sections of the configuration, such as `ModelConfig` and `BatchConfig`."""
