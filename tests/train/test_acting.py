"""The rollout's way from observations to actions: the network's own, bit for bit."""

from __future__ import annotations

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch

from helm_rl.control.policy_net import CLIP, ActorCritic
from train.acting import Acting

STEPS = 20


@pytest.mark.parametrize(
    ("num_envs", "dtype", "action_size"), [(1, np.float64, 1), (8, np.float32, 1), (13, np.float64, 3)]
)
@pytest.mark.parametrize("reads", [5, 3])
def test_it_is_the_networks(num_envs: int, dtype: type[np.floating], action_size: int, reads: int) -> None:
    rng = np.random.default_rng(num_envs)
    net = ActorCritic(5, action_size, generator=torch.Generator().manual_seed(num_envs))
    with torch.no_grad():
        net.actor[-1].weight *= 30.0  # type: ignore[operator]
    twin = copy.deepcopy(net)
    read = torch.tensor([1.0] * reads + [0.0] * (5 - reads))
    space = gym.spaces.Box(-1.0, np.linspace(0.5, 1.0, action_size, dtype=dtype), (action_size,), dtype)
    acting = Acting(net, read, space, STEPS, num_envs)
    acting.draw_noise(torch.Generator().manual_seed(7))
    noise = torch.randn((STEPS, num_envs, action_size), generator=torch.Generator().manual_seed(7))
    log = np.zeros((STEPS, num_envs, action_size), dtype)
    for step in range(STEPS):
        obs = (rng.normal(size=(num_envs, 5)) * [1, 10, 1e-3, 0, 3] + [0, 1e6, 5, 2, 0]).astype(dtype)
        obs[0, 4] = 1e9 * rng.integers(2)  # beyond the clip at times
        action = acting(step, obs, log[step])
        with torch.no_grad():
            twin.normaliser.update(torch.from_numpy(obs))
            normalised = twin.normaliser(torch.from_numpy(obs)) * read
            mean = twin.actor(normalised)
            drawn = mean + noise[step] * twin.log_std.exp()
        for name, value in twin.state_dict().items():
            assert torch.equal(net.state_dict()[name], value), name
        assert torch.equal(acting.obs[step], normalised)
        assert torch.equal(acting.means[step], mean)
        assert torch.equal(acting.actions[step], drawn)
        assert action is not None
        assert action.dtype == dtype
        assert (action == np.clip(drawn.numpy(), space.low, space.high)).all()
        assert (log[step] == action).all()
        action[:] = 5.0  # as an environment may
        assert (log[step] <= 1.0).all()
    assert net.normaliser.count.item() == STEPS * num_envs
    assert acting.obs.abs().max() <= CLIP
    assert (acting.actions.numpy() > space.high).any()
    assert (acting.actions.numpy() < space.low).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_observation_that_is_not_finite_is_not_acted_on(value: float) -> None:
    acting = Acting(ActorCritic(2, 1), torch.ones(2), gym.spaces.Box(-1.0, 1.0, (1,)), 2, 3)
    acting.draw_noise(torch.Generator())
    log = np.zeros((3, 1), np.float32)
    obs = np.full((3, 2), 1e200)  # its squares are not finite, it is
    assert acting(0, obs, log) is not None
    obs[2, 1] = value
    assert acting(1, obs, log) is None
