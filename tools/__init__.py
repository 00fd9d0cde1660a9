"""What a person runs now and then; each file is a command."""
