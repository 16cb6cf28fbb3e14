"""The networks that PPO trains: an actor and a critic, with the observation's normaliser inside the module."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

HIDDEN = (64, 64)
"""Widths of the hidden layers of the actor and of the critic."""

CLIP = 10.0
"""Normalised observations are clipped to +-CLIP standard deviations."""

EPSILON = 1e-6
"""Added to the variance: a feature that has hardly moved yet must not be blown up when it first does."""

LOG_STD = -0.5
"""Initial log standard deviation of an action: wide enough to explore Box(-1, 1) without living on its edges."""


class Normaliser(nn.Module):
    """Running mean and variance of what `update` was shown, in float64 and starting from a count of zero.

    A pseudo-count at mean 0, or float32, would be wrong for long: at mean 1e6 and sd 10 the sd comes out as 17.
    The statistics are buffers, so they travel with the weights.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, batch: Tensor) -> None:
        """Take in a batch, shape (n, size), of any float type. In evaluation (`eval()`) the statistics are frozen.

        Method: Chan, Golub, LeVeque (1979), the pairwise update of mean and variance.
        """
        if not self.training:
            return
        batch = batch.double()
        n = batch.shape[0]
        var, mean = torch.var_mean(batch, dim=0, correction=0)
        total = self.count + n
        delta = mean - self.mean
        share = n / total
        # At a count of zero the share is one, and nothing of the initial mean and variance is left.
        self.var.mul_(1 - share).add_(var * share + delta.square() * (share * (1 - share)))
        self.mean.add_(delta * share)
        self.count.copy_(total)

    @property
    def std(self) -> Tensor:
        """Standard deviation, float64 (size,), bounded away from zero."""
        return torch.sqrt(self.var + EPSILON)

    def forward(self, batch: Tensor) -> Tensor:
        """Normalise a batch, shape (..., size), of any float type; float32 within +-CLIP comes out."""
        return ((batch.double() - self.mean) / self.std).clamp(-CLIP, CLIP).float()


class ActorCritic(nn.Module):
    """A Gaussian policy and a value function over raw observations.

    Both are tanh networks with orthogonal weights. The actor's last layer starts near zero, so the first mean
    action is close to "do nothing"; the deviation does not depend on the observation. The critic predicts
    values in units of the spread of the returns seen so far (`returns`), so that the size of the rewards does
    not matter to its learning.

    Args:
        obs_size: Length of an observation.
        action_size: Length of an action.
        hidden: Widths of the hidden layers.
        generator: Source of the initial weights; torch's global one if None.
    """

    def __init__(
        self,
        obs_size: int,
        action_size: int,
        hidden: Sequence[int] = HIDDEN,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.normaliser = Normaliser(obs_size)
        self.returns = Normaliser(1)
        self.actor = _mlp(obs_size, hidden, action_size, 0.01, generator)
        self.critic = _mlp(obs_size, hidden, 1, 1.0, generator)
        self.log_std = nn.Parameter(torch.full((action_size,), LOG_STD))

    def forward(self, observation: Tensor) -> Tensor:
        """Return the deterministic action, not clipped, (..., action_size), for raw observations (..., obs_size)."""
        mean: Tensor = self.actor(self.normaliser(observation))
        return mean

    def log_prob(self, mean: Tensor, action: Tensor) -> Tensor:
        """Log density of actions under the policy with these means: shapes (..., action_size) to (...)."""
        z = (action - mean) * torch.exp(-self.log_std)
        return (-0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self) -> Tensor:
        """Entropy of the policy, a scalar: it depends on the deviation alone."""
        return (self.log_std + 0.5 * (1 + math.log(2 * math.pi))).sum()

    def scaled_value(self, normalised: Tensor) -> Tensor:
        """Value in units of the returns' spread, shape (...), for normalised observations (..., obs_size)."""
        value: Tensor = self.critic(normalised)
        return value.squeeze(-1)

    def scale_returns(self, returns: Tensor) -> Tensor:
        """Bring returns, shape (n,), to the units of `scaled_value`, float32. Not clipped: a target is a target."""
        return ((returns.double() - self.returns.mean) / self.returns.std).float()

    def value(self, normalised: Tensor) -> Tensor:
        """Value in the rewards' own units, float64, shape (...), for normalised observations (..., obs_size)."""
        return self.scaled_value(normalised).double() * self.returns.std + self.returns.mean


def _mlp(
    inputs: int, hidden: Sequence[int], outputs: int, gain: float, generator: torch.Generator | None
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [_linear(inputs, width, math.sqrt(2), generator), nn.Tanh()]
        inputs = width
    layers.append(_linear(inputs, outputs, gain, generator))
    return nn.Sequential(*layers)


def _linear(inputs: int, outputs: int, gain: float, generator: torch.Generator | None) -> nn.Linear:
    # skip_init: the layer's own default initialisation would draw from torch's global generator.
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer
