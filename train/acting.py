"""A rollout's way from observations to actions: normalised, through the actor, with noise, clipped.

The numbers are those of `Normaliser` and `ActorCritic`, bit for bit. Between two steps of a simulator the processor's
caches hold little of this, so what it costs is how many calls there are: two compiled ones and the actor's layers,
instead of some forty small operations.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cache_engine.jit import kernel
from helm_rl.control.policy_net import CLIP, EPSILON, ActorCritic
from train.minibatch import forward, layers_of, outputs

Floats = npt.NDArray[np.float64]
Actions = npt.NDArray[Any]


class Acting:
    """The memory of a rollout, and the policy in training that fills it step by step.

    Args:
        net: What is trained; its normaliser takes in what is seen.
        read: Which features the policy reads, ones and zeros, float32 [obs_size].
        space: Of actions; what is handed out is clipped to it and has its dtype.
        num_steps, num_envs: Size of the memory.
    """

    obs: Tensor
    """Observations as they were normalised when acted on, float32 [num_steps, num_envs, obs_size]."""
    means: Tensor
    """What the actor said, float32 [num_steps, num_envs, action_size]."""
    actions: Tensor
    """What was drawn around that, not clipped, of the same shape."""

    def __init__(self, net: ActorCritic, read: Tensor, space: gym.spaces.Box, num_steps: int, num_envs: int) -> None:
        (action_size,) = space.shape
        self.obs = torch.zeros((num_steps, num_envs, len(read)))
        self.means = torch.zeros((num_steps, num_envs, action_size))
        self.actions, self._noise = torch.zeros_like(self.means), torch.zeros_like(self.means)
        self._net, self._space = net, space
        self._read = None if bool(read.all()) else read
        self._low, self._high = space.low, space.high
        # Views are made once: to make one takes as long as a small operation
        self._obs_at, self._means_at = list(self.obs), list(self.means)
        self._obs_np, self._means_np = self.obs.numpy(), self.means.numpy()
        self._actions_np, self._noise_np = self.actions.numpy(), self._noise.numpy()
        normaliser = net.normaliser
        self._statistics = normaliser.mean.numpy(), normaliser.var.numpy(), normaliser.count.numpy().reshape(1)
        self._work = np.empty((2, len(read)))
        self._layers = layers_of(net.actor)
        self._hidden = outputs(self._layers[:-1], num_envs)

    @torch.no_grad()
    def draw_noise(self, generator: torch.Generator) -> None:
        """Draw the noise of a whole rollout."""
        torch.randn(self._noise.shape, generator=generator, out=self._noise)
        self._noise *= self._net.log_std.exp()

    @torch.no_grad()
    def __call__(self, step: int, obs: npt.NDArray[np.floating], log: Actions) -> Actions | None:
        """Act on the step's observations, [num_envs, obs_size] of any float type.

        Returns the actions for the environments, of the space's dtype, [num_envs, action_size], which are also in
        `log`, of the same shape; or None where not all observations are finite: the statistics are spoilt then.
        """
        batch = np.ascontiguousarray(obs, np.float64)
        if not _take_in(batch, *self._statistics, self._work, step, self._obs_np):
            return None
        inputs = self._obs_at[step]
        if self._read is not None:
            inputs *= self._read
        forward(self._layers, inputs, [*self._hidden, self._means_at[step]])
        action = np.empty(log.shape, self._space.dtype)
        _draw(self._means_np, self._noise_np, self._low, self._high, step, self._actions_np, log, action)
        return action


@kernel
def _take_in(
    batch: Floats, mean: Floats, var: Floats, count: Floats, work: Floats, step: int, out: npt.NDArray[np.float32]
) -> bool:
    """Take observations into the statistics, and put what they are normalised to into `out[step]`.

    work: two rows. Returns whether all observations are finite.
    """
    n, size = batch.shape
    finite = True
    for j in range(size):  # Welford (1962), as torch.var_mean
        middle = m2 = 0.0
        for i in range(n):
            finite = finite and math.isfinite(batch[i, j])
            delta = batch[i, j] - middle
            middle += delta / (i + 1)
            m2 += delta * (batch[i, j] - middle)
        work[0, j], work[1, j] = middle, m2
    total = count[0] + n
    share = 1.0 / total * n  # as torch divides a number by a tensor
    for j in range(size):
        delta = work[0, j] - mean[j]
        var[j] = var[j] * (1 - share) + (work[1, j] / n * share + delta * delta * (share * (1 - share)))
        mean[j] += delta * share
        std = math.sqrt(var[j] + EPSILON)
        for i in range(n):
            out[step, i, j] = min(max((batch[i, j] - mean[j]) / std, -CLIP), CLIP)
    count[0] = total
    return finite


@kernel
def _draw(
    means: npt.NDArray[np.float32],
    noise: npt.NDArray[np.float32],
    low: Actions,
    high: Actions,
    step: int,
    drawn: npt.NDArray[np.float32],
    log: Actions,
    action: Actions,
) -> None:
    """Add the step's noise to its means, into `drawn[step]`, and clipped into the last two."""
    for i in range(means.shape[1]):
        for j in range(means.shape[2]):
            one = means[step, i, j] + noise[step, i, j]
            drawn[step, i, j] = one
            clipped = np.float64(one)
            if one < low[j]:
                clipped = np.float64(low[j])
            elif one > high[j]:
                clipped = np.float64(high[j])
            log[i, j] = action[i, j] = clipped
