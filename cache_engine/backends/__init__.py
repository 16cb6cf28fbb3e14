"""Where cache operations run: `cpu` (NumPy, numba) and `cuda` (CuPy); `protocol` is what both offer."""
