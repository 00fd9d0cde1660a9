"""Commands for occasional use. Each Python file in this folder is a command."""
