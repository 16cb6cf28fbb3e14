"""Harnesses that measure P99 and the gap to the optimal ratio."""

from eval.evaluation import evaluate

__all__ = ["evaluate"]
