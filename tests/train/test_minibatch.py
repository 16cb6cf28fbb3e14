"""A step on a minibatch: what autograd, `clip_grad_norm_` and Adam make of it, bit for bit with one action."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from helm_rl.control.policy_net import ActorCritic
from train.minibatch import Batch, Gradient, Losses, OnePiece, Steps


def by_autograd(
    net: ActorCritic, batch: Batch, policy_weight: float, norm_adv: bool, clip: float, ent: float, vf: float
) -> tuple[Losses, tuple[float, float]]:
    """Return losses and estimates of the KL divergence; put the gradient where torch does."""
    newlogprob = net.log_prob(net.actor(batch.obs), batch.actions)
    logratio = newlogprob - batch.logprobs
    ratio = logratio.exp()
    adv = batch.advantages
    if norm_adv:
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    policy = -torch.min(adv * ratio, adv * ratio.clamp(1 - clip, 1 + clip)).mean()
    value = 0.5 * (net.scaled_value(batch.obs) - batch.targets).square().mean()
    entropy = net.entropy()
    total = policy_weight * (policy - ent * entropy) + vf * value
    net.zero_grad()
    total.backward()
    outside = ((ratio - 1).abs() > clip).float().mean()
    kl = (-logratio).mean().item(), ((ratio - 1) - logratio).mean().item()
    return Losses(total.item(), policy.item(), value.item(), entropy.item(), outside.item()), kl


def data(net: ActorCritic, n: int, obs_size: int, action_size: int, generator: torch.Generator) -> Batch:
    """Samples of a policy that has moved since, so that some ratios lie outside the clip."""
    obs = torch.randn(n, obs_size, generator=generator)
    actions = torch.randn(n, action_size, generator=generator)
    with torch.no_grad():
        logprobs = net.log_prob(net.actor(obs), actions) + 0.2 * torch.randn(n, generator=generator)
    return Batch(obs, actions, logprobs, 3 * torch.randn(n, generator=generator), torch.randn(n, generator=generator))


@pytest.mark.parametrize(
    ("obs_size", "action_size", "n", "policy_weight", "norm_adv", "ent", "vf"),
    [
        (17, 1, 256, 1.0, True, 0.0, 0.5),
        (17, 1, 256, 0.0, True, 0.0, 0.5),
        (4, 1, 100, 1.0, True, 0.01, 0.7),
        (1, 1, 3, 1.0, False, 0.013, 0.31),
        (20, 3, 77, 1.0, True, 0.013, 0.31),
    ],
)
def test_losses_and_gradient_are_autograds(
    obs_size: int, action_size: int, n: int, policy_weight: float, norm_adv: bool, ent: float, vf: float
) -> None:
    generator = torch.Generator().manual_seed(n)
    net = ActorCritic(obs_size, action_size, generator=generator)
    with torch.no_grad():
        for parameter in net.parameters():  # off zero, and log_std off its start
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    batch = data(net, n, obs_size, action_size, generator)
    expected, kl = by_autograd(net, batch, policy_weight, norm_adv, 0.2, ent, vf)
    gradient = {name: parameter.grad for name, parameter in net.named_parameters()}
    OnePiece(net)
    ours = Gradient(net, norm_adv, 0.2, ent, vf)
    found = ours(batch, policy_weight)
    assert found == expected
    assert ours.kl_divergence() == kl
    assert n < 50 or 0.0 < found.clip_fraction < 1.0
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        if action_size == 1:
            assert torch.equal(parameter.grad, gradient[name]), name
        else:  # sums over several actions may be taken in another order
            torch.testing.assert_close(parameter.grad, gradient[name], rtol=1e-5, atol=1e-7, msg=name)


def test_steps_are_adams_along_a_bounded_gradient() -> None:
    generator = torch.Generator().manual_seed(1)
    net = ActorCritic(5, 1, generator=generator)
    twin = copy.deepcopy(net)
    batches = [data(net, 64, 5, 1, generator) for _ in range(4)]
    optimisers = [torch.optim.Adam(each.parameters(), lr=1e-2, eps=1e-5, fused=True) for each in (net, twin)]
    whole = OnePiece(net)
    gradient, steps = Gradient(net, True, 0.2, 0.0, 0.5), Steps(whole, optimisers[0], 1.2)
    norms = []
    for k, batch in enumerate(batches):
        for optimiser in optimisers:
            optimiser.param_groups[0]["lr"] = 1e-2 / (k + 1)  # as annealing does
        gradient(batch, 1.0)
        norms.append(steps.clip())
        steps.step()
        by_autograd(twin, batch, 1.0, True, 0.2, 0.0, 0.5)
        assert norms[-1] == float(torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.2))
        optimisers[1].step()
        for (name, one), other in zip(net.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(one, other), (k, name)
            for key, value in optimisers[1].state[other].items():
                assert torch.equal(optimisers[0].state[one][key], value), (k, name, key)
    assert min(norms) < 1.18 < 1.2 < max(norms)  # scaled down, and left alone


def test_a_gradient_within_the_bound_stays() -> None:
    net = torch.nn.Linear(2, 1)
    whole = OnePiece(net)
    assert net.weight.grad is not None
    assert net.bias.grad is not None
    net.weight.grad[:], net.bias.grad[:] = torch.tensor([[0.1, 0.2]]), 0.2
    assert Steps(whole, torch.optim.Adam(net.parameters()), 1.0).clip() == pytest.approx(0.3)
    assert net.weight.grad.tolist() == [[pytest.approx(0.1), pytest.approx(0.2)]]


@pytest.mark.parametrize("most", [1e-6, 1e-5, 1e-4, 0.5])
@pytest.mark.parametrize("share", [0.5, 0.97, 0.995, 1.0, 2.0])
def test_a_bound_however_small_is_torchs(most: float, share: float) -> None:
    """1e-6 is added to the norm there, so that a small bound scales down gradients that are within it."""
    net = torch.nn.Linear(2, 2)
    given = share * most / math.sqrt(6)
    whole = OnePiece(net)
    for gradient in whole.views_of(whole.gradient):
        gradient.fill_(given)
    Steps(whole, torch.optim.Adam(net.parameters()), most).clip()
    found = [parameter.grad for parameter in net.parameters()]
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, given)
    torch.nn.utils.clip_grad_norm_(net.parameters(), most)
    for one, parameter in zip(found, net.parameters(), strict=True):
        assert one is not None
        assert parameter.grad is not None
        assert torch.equal(one, parameter.grad)


def test_minibatches_take_every_sample_once_in_the_given_order() -> None:
    net = ActorCritic(2, 1)
    batch = data(net, 7, 2, 1, torch.Generator().manual_seed(3))
    order = torch.tensor([6, 0, 5, 1, 4, 2, 3])
    parts = list(batch.minibatches(order, 3))
    assert [len(part.obs) for part in parts] == [3, 3, 1]
    for name in Batch._fields:
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name)[order]), name


def test_a_loss_that_is_not_finite_shows_in_the_total() -> None:
    net = ActorCritic(2, 1)
    batch = data(net, 4, 2, 1, torch.Generator().manual_seed(3))
    batch.targets[2] = math.inf
    OnePiece(net)
    assert not math.isfinite(Gradient(net, True, 0.2, 0.0, 0.5)(batch, 1.0).total)
