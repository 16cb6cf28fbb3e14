"""One HBM pool and the caches that share it."""
