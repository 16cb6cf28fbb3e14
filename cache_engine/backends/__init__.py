"""Where cache operations run: `cpu` (NumPy and numba). A CUDA backend takes its place beside it."""
