"""Kernels for the CPU: compiled functions over plain arrays, called by the classes and by any compiled loop alike."""
