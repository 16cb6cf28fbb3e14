"""PPO's step on a minibatch, its gradient written out: the numbers of autograd and Adam in half the time.

The networks are so small that most of an eager step is bookkeeping: modules, the graph, the optimiser's wrappers,
memory asked for and given back. Each operation here is the one that autograd runs, in its order, so that a training
gives the same policy either way, bit for bit; with several actions, the sums over samples in the gradient of log_std
may differ in their last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from cache_engine.jit import kernel
from helm_rl.control.policy_net import ActorCritic

Floats = npt.NDArray[np.float32]


class Losses(NamedTuple):
    """What a step says of its minibatch, before it moved the networks."""

    total: float
    policy: float
    value: float
    entropy: float
    clip_fraction: float


class Batch(NamedTuple):
    """Samples: obs, normalised, [n, obs_size]; actions, [n, action_size]; the others [n]; all float32."""

    obs: Tensor
    actions: Tensor
    logprobs: Tensor
    advantages: Tensor
    targets: Tensor

    def minibatches(self, order: Tensor, size: int) -> Iterator[Batch]:
        """Yield the samples, `size` at a time, in this order, int64 [n]."""
        columns = [column.index_select(0, order).split(size) for column in self]
        return map(Batch._make, zip(*columns, strict=True))


class OnePiece:
    """A network's parameters in one tensor, its gradient in another: what takes each number alone takes all at once.

    The network stays what it is: its parameters, and their `.grad`, become views. Whoever keeps views of its parameters
    must make them afterwards.
    """

    def __init__(self, net: nn.Module) -> None:
        self.views: list[Tensor] = list(net.parameters())
        self._odd = [k for k, view in enumerate(self.views) if view.numel() % _ALIGNED]
        # What fills vector registers lies together, in front
        self._starts, self._size = [0] * len(self.views), 0
        for k in [k for k in range(len(self.views)) if k not in self._odd] + self._odd:
            self._starts[k] = self._size
            self._size += -(-self.views[k].numel() // _ALIGNED) * _ALIGNED
        self.parameters, self.gradient = torch.zeros(self._size), torch.zeros(self._size)
        for parameter, view, gradient in zip(
            self.views, self.views_of(self.parameters), self.views_of(self.gradient), strict=True
        ):
            parameter.data = view.copy_(parameter.detach())
            parameter.grad = gradient

    def views_of(self, whole: Tensor) -> list[Tensor]:
        """Return the views of a tensor laid out as `parameters`, one for each of the network's, in its order."""
        parts = zip(self._starts, self.views, strict=True)
        return [whole[start : start + view.numel()].view(view.shape) for start, view in parts]

    def vectors_of(self, whole: Tensor) -> list[Tensor]:
        """Return such a tensor in few parts: all that fills vector registers, and each of the others.

        The numbers at the end of a tensor that do not fill one may be rounded differently.
        """
        views = self.views_of(whole)
        return [whole[: min([self._starts[k] for k in self._odd], default=self._size)], *(views[k] for k in self._odd)]

    def vector_at(self, k: int) -> int:
        """Return which of `vectors_of` the network's parameter k lies in."""
        return 1 + self._odd.index(k) if k in self._odd else 0


_ALIGNED = 16
"""Each parameter begins at a multiple of so many numbers, a cache line and a vector register, as memory does."""


class Gradient:
    """Losses of minibatches, and their gradient in `.grad` of the network's parameters.

    Args:
        net: What is trained; its parameters have gradients, in place, as `OnePiece` makes them.
        norm_adv: Bring the advantages of a minibatch to mean 0 and deviation 1.
        clip_coef, ent_coef, vf_coef: Of PPO's loss.
    """

    def __init__(self, net: ActorCritic, norm_adv: bool, clip_coef: float, ent_coef: float, vf_coef: float) -> None:
        self._net = net
        self._norm_adv = norm_adv
        self._low, self._high, self._clip = (np.float32(x) for x in (1 - clip_coef, 1 + clip_coef, clip_coef))
        self._ent, self._vf = np.float32(ent_coef), np.float32(vf_coef)
        self._actor, self._critic = layers_of(net.actor), layers_of(net.critic)
        self._buffers = _Buffers(0, self._actor, self._critic)

    @torch.no_grad()
    def __call__(self, batch: Batch, policy_weight: float) -> Losses:
        """Take a minibatch; the policy's loss counts `policy_weight` times."""
        log_std = self._net.log_std
        n = len(batch.obs)
        if self._buffers.gains.shape != (n,):
            self._buffers = _Buffers(n, self._actor, self._critic)
        made = self._buffers

        # Forward, as ActorCritic.log_prob, .scaled_value and .entropy have it
        means = forward(self._actor, batch.obs, made.actor)
        values = forward(self._critic, batch.obs, made.critic)
        scale = torch.exp(-log_std)
        _log_prob_terms(
            batch.actions.numpy(), means.numpy(), scale.numpy(), log_std.detach().numpy(), made.off, made.z, made.terms
        )
        made.logratio = made.t_terms.sum(-1) - batch.logprobs
        made.ratio = made.logratio.exp()
        if self._norm_adv:
            adv_mean, adv_scale = batch.advantages.mean().item(), (batch.advantages.std() + 1e-8).item()
        else:
            adv_mean, adv_scale = 0.0, 1.0
        outside = _by_sample(
            batch.advantages.numpy(),
            np.float32(adv_mean),
            np.float32(adv_scale),
            made.logratio.numpy(),
            made.ratio.numpy(),
            made.z,
            made.off,
            scale.numpy(),
            values.numpy(),
            batch.targets.numpy(),
            self._low,
            self._high,
            self._clip,
            np.float32(-policy_weight / n),
            np.float32(0.5 * float(self._vf) / n),
            made.gains,
            made.misses,
            made.kl_terms,
            made.by_logprob,
            made.by_scale,
            made.by_mean,
            made.by_value,
        )
        policy = -np.float32(made.t_gains.mean().item())
        value = np.float32(0.5) * np.float32(made.t_misses.mean().item())
        entropy = np.float32(self._net.entropy().item())
        weight = np.float32(policy_weight)

        # Backward
        by_log_std = float(-weight * self._ent) - made.t_by_logprob.sum(0)
        torch.sub(by_log_std, made.t_by_scale.sum(0) * scale, out=log_std.grad)
        _backward(self._actor, [batch.obs, *made.actor], made.t_by_mean, made.by_actor)
        _backward(self._critic, [batch.obs, *made.critic], made.t_by_value, made.by_critic)
        total = weight * (policy - self._ent * entropy) + self._vf * value
        return Losses(
            float(total), float(policy), float(value), float(entropy), float(np.float32(outside) / np.float32(n))
        )

    def kl_divergence(self) -> tuple[float, float]:
        """Return two estimates, of the last minibatch (Schulman 2020, "Approximating KL divergence")."""
        return -self._buffers.logratio.mean().item(), self._buffers.t_kl_terms.mean().item()


class _Buffers:
    """Where the kernels put what they find of n samples; a name with t_ is the same memory as a tensor."""

    def __init__(self, n: int, actor: list[Layer], critic: list[Layer]) -> None:
        def array(*shape: int) -> tuple[Floats, Tensor]:
            made = np.zeros(shape, np.float32)
            return made, torch.from_numpy(made)

        action_size = len(actor[-1].bias)
        self.actor, self.critic = outputs(actor, n), outputs(critic, n)
        self.by_actor, self.by_critic = outputs(actor[:-1], n), outputs(critic[:-1], n)
        self.logratio = self.ratio = torch.zeros(n)
        self.gains, self.t_gains = array(n)
        self.misses, self.t_misses = array(n)
        self.kl_terms, self.t_kl_terms = array(n)
        self.by_logprob, self.t_by_logprob = array(n, 1)
        self.by_value, self.t_by_value = array(n, 1)
        self.off, _ = array(n, action_size)
        self.z, _ = array(n, action_size)
        self.terms, self.t_terms = array(n, action_size)
        self.by_scale, self.t_by_scale = array(n, action_size)
        self.by_mean, self.t_by_mean = array(n, action_size)


_HALF, _ONE, _TWO = np.float32(0.5), np.float32(1.0), np.float32(2.0)
_NORMAL = np.float32(0.5 * math.log(2 * math.pi))


@kernel
def _log_prob_terms(
    actions: Floats, means: Floats, scale: Floats, log_std: Floats, off: Floats, z: Floats, terms: Floats
) -> None:
    """Put each action's distance from its mean into `off`, in deviations into `z`, its log density into `terms`."""
    for i in range(actions.shape[0]):
        for j in range(actions.shape[1]):
            off[i, j] = actions[i, j] - means[i, j]
            z[i, j] = off[i, j] * scale[j]
            terms[i, j] = -_HALF * (z[i, j] * z[i, j]) - log_std[j] - _NORMAL


@kernel
def _by_sample(
    advantages: Floats,
    adv_mean: np.float32,
    adv_scale: np.float32,
    logratio: Floats,
    ratio: Floats,
    z: Floats,
    off: Floats,
    scale: Floats,
    values: Floats,
    targets: Floats,
    low: np.float32,
    high: np.float32,
    clip: np.float32,
    policy_share: np.float32,
    value_share: np.float32,
    gains: Floats,
    misses: Floats,
    kl_terms: Floats,
    by_logprob: Floats,
    by_scale: Floats,
    by_mean: Floats,
    by_value: Floats,
) -> int:
    """Put each sample's losses and gradients into the last seven; return how many ratios lie outside the clip.

    Where the smaller gain is the clipped one, it does not depend on the ratio; where the two are equal though the ratio
    is outside, the gradient takes half of each.
    """
    outside = 0
    for i in range(ratio.size):
        adv = (advantages[i] - adv_mean) / adv_scale
        clipped = min(max(ratio[i], low), high)
        plain_gain, clipped_gain = adv * ratio[i], adv * clipped
        if plain_gain < clipped_gain or plain_gain != plain_gain:  # a NaN stays one
            gains[i] = plain_gain
        else:
            gains[i] = clipped_gain
        counts = np.float32(0.0)
        if ratio[i] == clipped or plain_gain < clipped_gain:
            counts = _ONE
        elif plain_gain == clipped_gain:
            counts = _HALF
        by_logprob[i, 0] = adv * policy_share * counts * ratio[i]
        for j in range(z.shape[1]):
            by_z = by_logprob[i, 0] * -_HALF * (_TWO * z[i, j])
            by_scale[i, j] = by_z * off[i, j]
            by_mean[i, j] = -(by_z * scale[j])
        missed = values[i, 0] - targets[i]
        misses[i] = missed * missed
        by_value[i, 0] = _TWO * missed * value_share
        moved = ratio[i] - _ONE
        kl_terms[i] = moved - logratio[i]
        outside += abs(moved) > clip
    return outside


class Steps:
    """Steps of an optimiser along the gradient, its norm bounded: `clip_grad_norm_` and `step` without their wrappers.

    Args:
        net: What is trained, in one piece.
        optimiser: Adam over all of its parameters, one group, fused; its state becomes one piece, too.
        max_grad_norm: Bound on the norm of the gradient over all parameters.
    """

    def __init__(self, net: OnePiece, optimiser: torch.optim.Adam, max_grad_norm: float) -> None:
        self._net = net
        self._gradients = net.views_of(net.gradient)
        self._moved = net.vectors_of(net.parameters), net.vectors_of(net.gradient)
        self._optimiser = optimiser
        self._most = max_grad_norm
        self._state: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def clip(self) -> float:
        """Scale the gradient down to the bound where it is above; return the norm that it had."""
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self._gradients, 2.0)), 2.0)
        found = norm.item()
        if not found + 1e-6 < 0.99 * self._most:  # below, all would be multiplied by one
            self._net.gradient.mul_((self._most / (norm + 1e-6)).clamp(max=1.0))
        return found

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters."""
        if not self._state:
            if not all(self._optimiser.state[parameter] for parameter in self._net.views):
                self._optimiser.step()  # which makes the state
                return
            self._bring_together()
        (group,) = self._optimiser.param_groups
        beta1, beta2 = group["betas"]
        adam(
            *self._moved,
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

    def _bring_together(self) -> None:
        """Make what the optimiser holds for each parameter views of fewer tensors, which are stepped on."""
        states = [self._optimiser.state[parameter] for parameter in self._net.views]
        for name in ("exp_avg", "exp_avg_sq"):
            whole = torch.zeros_like(self._net.parameters)
            for state, view in zip(states, self._net.views_of(whole), strict=True):
                state[name] = view.copy_(state[name])
            self._state[name] = self._net.vectors_of(whole)
        self._state["step"] = [states[0]["step"].clone() for _ in self._moved[0]]
        for k, state in enumerate(states):
            state["step"] = self._state["step"][self._net.vector_at(k)]


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


def outputs(layers: list[Layer], n: int) -> list[Tensor]:
    """Return room for what comes out of each layer, for n samples."""
    return [torch.empty((n, len(layer.bias))) for layer in layers]


def forward(layers: list[Layer], inputs: Tensor, outs: list[Tensor]) -> Tensor:
    """Put what comes out of each layer into `outs`, and return the last."""
    for layer, out in zip(layers, outs, strict=True):
        torch.addmm(layer.bias, inputs, layer.transposed, out=out)
        if layer is not layers[-1]:
            out.tanh_()
        inputs = out
    return inputs


def _backward(layers: list[Layer], passed: list[Tensor], by_output: Tensor, by_hidden: list[Tensor]) -> None:
    """Put the gradient into the layers, given what went into each, and the gradient by the last one's output.

    by_hidden: room for the gradients by what comes out of the others.
    """
    for k in range(len(layers) - 1, -1, -1):
        layer = layers[k]
        torch.mm(by_output.t(), passed[k], out=layer.weight.grad)
        torch.sum(by_output, 0, out=layer.bias.grad)
        if k:
            by_passed = torch.mm(by_output, layer.weight, out=by_hidden[k - 1])
            by_output = torch.ops.aten.tanh_backward.grad_input(by_passed, passed[k], grad_input=by_passed)
