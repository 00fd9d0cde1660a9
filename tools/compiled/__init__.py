"""The table of compiled kernels, and what their machine code contains."""
