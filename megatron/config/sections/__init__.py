"""Define the sections of the configuration, by what they describe."""
