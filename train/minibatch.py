"""PPO's step on a minibatch, its gradient written out: the numbers of autograd and Adam, bit for bit, in half the time.

The networks are so small that most of an eager step is bookkeeping: modules, the graph, the optimiser's wrappers. Each
operation here is the one that autograd runs, in its order, so that a training gives the same policy either way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from helm_rl.control.policy_net import ActorCritic


class Losses(NamedTuple):
    """What a step says of its minibatch, before it moved the networks; each a scalar tensor.

    old_approx_kl, approx_kl: two estimates of the KL divergence (Schulman 2020, "Approximating KL divergence").
    """

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    old_approx_kl: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


class Batch(NamedTuple):
    """Samples: obs, normalised, [n, obs_size]; actions, [n, action_size]; the others [n]; all float32."""

    obs: Tensor
    actions: Tensor
    logprobs: Tensor
    advantages: Tensor
    targets: Tensor

    def minibatches(self, order: Tensor, size: int) -> Iterator[Batch]:
        """Yield the samples, `size` at a time, in this order, int64 [n]."""
        columns = [column[order].split(size) for column in self]
        return map(Batch._make, zip(*columns, strict=True))


class Gradient:
    """Losses of minibatches, and their gradient in `.grad` of the network's parameters.

    Args:
        net: What is trained.
        norm_adv: Bring the advantages of a minibatch to mean 0 and deviation 1.
        clip_coef, ent_coef, vf_coef: Of PPO's loss.
    """

    def __init__(self, net: ActorCritic, norm_adv: bool, clip_coef: float, ent_coef: float, vf_coef: float) -> None:
        self._net = net
        self._norm_adv = norm_adv
        self._clip, self._ent = clip_coef, ent_coef
        self._vf = float(np.float32(vf_coef))  # as torch multiplies by it
        self._actor, self._critic = layers_of(net.actor), layers_of(net.critic)

    @torch.no_grad()
    def __call__(self, batch: Batch, policy_weight: float) -> Losses:
        """Take a minibatch; the policy's loss counts `policy_weight` times."""
        log_std = self._net.log_std
        obs, actions, logprobs, adv, targets = batch
        n = len(obs)

        # Forward, as ActorCritic.log_prob, .scaled_value and .entropy have it
        actor_passed, means = forward(self._actor, obs)
        critic_passed, values = forward(self._critic, obs)
        scale = torch.exp(-log_std)
        off = actions - means
        z = off * scale
        newlogprob = (-0.5 * z.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        logratio = newlogprob - logprobs
        ratio = logratio.exp()
        moved = ratio - 1.0
        if self._norm_adv:
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        clipped = ratio.clamp(1 - self._clip, 1 + self._clip)
        plain_gain, clipped_gain = adv * ratio, adv * clipped
        policy = -torch.min(plain_gain, clipped_gain).mean()
        missed = values.squeeze(-1) - targets
        value = 0.5 * missed.square().mean()
        entropy = self._net.entropy()
        total = policy_weight * (policy - self._ent * entropy) + self._vf * value

        # Backward, of the policy: where the smaller gain is the clipped one, it does not depend on the ratio; where the
        # two are equal, the gradient takes half of each
        by_gain = adv * (-policy_weight / n)
        within = ratio == clipped
        counts = torch.where(within | (plain_gain < clipped_gain), 1.0, 0.5 * (plain_gain == clipped_gain))
        by_logprob = (by_gain * counts * ratio).unsqueeze(-1)
        by_z = by_logprob * -0.5 * (2.0 * z)
        by_log_std = -(policy_weight * self._ent) - by_logprob.sum(0)
        log_std.grad = by_log_std - (by_z * off).sum(0) * scale
        _backward(self._actor, actor_passed, -(by_z * scale))

        # And of the value
        _backward(self._critic, critic_passed, (2.0 * missed * (0.5 * self._vf / n)).unsqueeze(-1))
        return Losses(
            total=total,
            policy=policy,
            value=value,
            entropy=entropy,
            old_approx_kl=-logratio.mean(),
            approx_kl=(moved - logratio).mean(),
            clip_fraction=(moved.abs() > self._clip).float().mean(),
        )


class Steps:
    """Steps of an optimiser along the gradient, its norm bounded: `clip_grad_norm_` and `step` without their wrappers.

    Args:
        net: What is trained.
        optimiser: Adam over all parameters of the network, one group, fused; its state stays where it is.
        max_grad_norm: Bound on the norm of the gradient over all parameters.
    """

    def __init__(self, net: nn.Module, optimiser: torch.optim.Adam, max_grad_norm: float) -> None:
        self._parameters: list[Tensor] = list(net.parameters())
        self._optimiser = optimiser
        self._most = max_grad_norm
        self._state: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def clip(self) -> Tensor:
        """Scale the gradient down to the bound where it is above; return the norm that it had, a scalar."""
        grads = self._grads()
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2.0)), 2.0)
        torch._foreach_mul_(grads, (self._most / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters."""
        if not self._state:
            states = [self._optimiser.state[parameter] for parameter in self._parameters]
            if not all(states):
                self._optimiser.step()  # which makes the state
                return
            self._state = {name: [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")}
        (group,) = self._optimiser.param_groups
        beta1, beta2 = group["betas"]
        adam(
            self._parameters,
            self._grads(),
            self._state["exp_avg"],
            self._state["exp_avg_sq"],
            [],
            self._state["step"],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )

    def _grads(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


class Layer(NamedTuple):
    """A linear layer's parameters, and the weight's view that it multiplies by."""

    weight: Tensor
    bias: Tensor
    transposed: Tensor


def layers_of(network: nn.Sequential) -> list[Layer]:
    """Return the linear layers of a network whose others are tanh, between them."""
    kinds = [type(layer) for layer in network]
    assert kinds == [nn.Linear, nn.Tanh] * (len(kinds) // 2) + [nn.Linear], kinds
    linear = [layer for layer in network if isinstance(layer, nn.Linear)]
    return [Layer(layer.weight, layer.bias, layer.weight.detach().t()) for layer in linear]


def forward(layers: list[Layer], inputs: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return what went into each layer, and what came out of the last."""
    passed = [inputs]
    for layer in layers[:-1]:
        passed.append(torch.addmm(layer.bias, passed[-1], layer.transposed).tanh_())
    return passed, torch.addmm(layers[-1].bias, passed[-1], layers[-1].transposed)


def _backward(layers: list[Layer], passed: list[Tensor], by_output: Tensor) -> None:
    """Put the gradient into the layers, given that by the last one's output."""
    for k in range(len(layers) - 1, -1, -1):
        layers[k].weight.grad = torch.mm(by_output.t(), passed[k])
        layers[k].bias.grad = by_output.sum(0)
        if k:
            by_output = torch.ops.aten.tanh_backward(torch.mm(by_output, layers[k].weight), passed[k])
