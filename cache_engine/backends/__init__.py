"""Where the cache operations run: cpu (NumPy and numba)."""
