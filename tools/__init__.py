"""Commands for occasional use. Each Python file directly in this folder is a command."""
