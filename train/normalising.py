"""The normaliser's running statistics and its output for one step's observations, in one compiled call.

Bit for bit what `Normaliser.update` and `Normaliser.forward` give, of which torch makes some thirty small operations.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from cache_engine.jit import kernel
from helm_rl.control.policy_net import CLIP, EPSILON, Normaliser

Floats = npt.NDArray[np.float64]


class Normalising:
    """A normaliser in training, which stays what it is: its buffers are changed in place."""

    def __init__(self, normaliser: Normaliser) -> None:
        self._mean, self._var = normaliser.mean.numpy(), normaliser.var.numpy()
        self._count = normaliser.count.numpy().reshape(1)
        self._batch_mean, self._batch_m2 = np.empty_like(self._mean), np.empty_like(self._mean)

    def __call__(self, obs: npt.NDArray[np.floating], out: npt.NDArray[np.float32]) -> None:
        """Take in observations, [n, size] of any float type, and put what they are normalised to into `out`."""
        batch = np.ascontiguousarray(obs, np.float64)
        _take_in(batch, self._mean, self._var, self._count, self._batch_mean, self._batch_m2)
        _normalise(batch, self._mean, self._var, out)


@kernel
def _take_in(batch: Floats, mean: Floats, var: Floats, count: Floats, batch_mean: Floats, batch_m2: Floats) -> None:
    n, size = batch.shape
    for j in range(size):  # Welford (1962), as torch.var_mean
        middle = m2 = 0.0
        for i in range(n):
            delta = batch[i, j] - middle
            middle += delta / (i + 1)
            m2 += delta * (batch[i, j] - middle)
        batch_mean[j], batch_m2[j] = middle, m2
    total = count[0] + n
    share = 1.0 / total * n  # as torch divides a number by a tensor
    for j in range(size):
        delta = batch_mean[j] - mean[j]
        var[j] = var[j] * (1 - share) + (batch_m2[j] / n * share + delta * delta * (share * (1 - share)))
        mean[j] += delta * share
    count[0] = total


@kernel
def _normalise(batch: Floats, mean: Floats, var: Floats, out: npt.NDArray[np.float32]) -> None:
    for j in range(batch.shape[1]):
        std = math.sqrt(var[j] + EPSILON)
        for i in range(batch.shape[0]):
            out[i, j] = min(max((batch[i, j] - mean[j]) / std, -CLIP), CLIP)
