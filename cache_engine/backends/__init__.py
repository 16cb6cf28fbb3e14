"""Where cache operations run: `cpu` (NumPy and numba). The CUDA backend takes its place beside it as `cuda.py` and `kernels.cu`."""
