"""Compare plans with measurements. Each file is a command."""
