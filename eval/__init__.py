"""Harnesses that measure P99 and the gap to the optimal ratio."""
