"""The networks: their statistics, their first action, their densities and units."""

from __future__ import annotations

import numpy as np
import torch

from helm_rl.control.policy_net import CLIP, ActorCritic, Normaliser


def test_the_normaliser_is_exact_far_from_zero() -> None:
    # float32 or a pseudo-count at mean 0 would report an sd of 17 here.
    values = np.random.default_rng(0).normal(1e6, 10.0, size=(4000, 2))
    normaliser = Normaliser(2)
    first, second, *rest = np.split(values, [1, 8, 500])
    for batch in (first, second, *rest):
        normaliser.update(torch.from_numpy(batch))
    assert normaliser.count.item() == 4000
    np.testing.assert_allclose(normaliser.mean.numpy(), values.mean(0), rtol=1e-12)
    np.testing.assert_allclose(normaliser.std.numpy(), values.std(0), rtol=1e-6)
    assert abs(normaliser.std[0].item() - 10.0) < 0.5
    normal = normaliser(torch.from_numpy(values)).numpy()
    assert normal.dtype == np.float32
    np.testing.assert_allclose(normal.std(0), 1.0, atol=1e-4)


def test_the_normaliser_leaves_its_input_alone_before_it_has_seen_any() -> None:
    normaliser = Normaliser(3)
    x = torch.tensor([[0.5, -2.0, 3.0]])
    torch.testing.assert_close(normaliser(x), x, rtol=1e-6, atol=0.0)
    normaliser.update(x)
    assert normaliser(x).tolist() == [[0.0, 0.0, 0.0]]  # nothing of the initial mean is left


def test_the_normaliser_clips() -> None:
    normaliser = Normaliser(1)
    normaliser.update(torch.tensor([[-1.0], [1.0]]))
    assert normaliser(torch.tensor([[1e9], [-1e9]])).flatten().tolist() == [CLIP, -CLIP]


def test_the_normaliser_is_frozen_in_evaluation() -> None:
    net = ActorCritic(3, 1).eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.normaliser.update(torch.ones((5, 3)))
    net(torch.ones((5, 3)))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    net.train()
    net.normaliser.update(torch.ones((5, 3)))
    assert net.normaliser.count.item() == 5


def test_the_statistics_are_part_of_the_state() -> None:
    net = ActorCritic(3, 1)
    net.normaliser.update(torch.rand((50, 3)) * 9 + 4)
    other = ActorCritic(3, 1)
    other.load_state_dict(net.state_dict())
    x = torch.rand((7, 3)) * 9 + 4
    assert torch.equal(net(x), other(x))


def test_the_first_mean_action_is_near_zero_and_the_weights_follow_from_the_generator() -> None:
    state = torch.get_rng_state()
    net = ActorCritic(17, 2, generator=torch.Generator().manual_seed(3))
    again = ActorCritic(17, 2, generator=torch.Generator().manual_seed(3))
    other = ActorCritic(17, 2, generator=torch.Generator().manual_seed(4))
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.randn((1000, 17), generator=torch.Generator().manual_seed(0))
    assert net(x).abs().max().item() < 0.1
    assert torch.equal(net(x), again(x))
    assert not torch.equal(net(x), other(x))
    # Orthogonal: the columns of a hidden layer's weights are at right angles, with the gain's length.
    weight = net.get_parameter("actor.0.weight")
    torch.testing.assert_close(weight.T @ weight, 2.0 * torch.eye(17), atol=1e-4, rtol=0.0)


def test_densities_agree_with_torch() -> None:
    net = ActorCritic(4, 3)
    with torch.no_grad():
        net.log_std.copy_(torch.tensor([-1.0, 0.0, 0.7]))
    mean, action = torch.randn((6, 3)), torch.randn((6, 3)) * 3
    normal = torch.distributions.Normal(mean, net.log_std.exp())
    torch.testing.assert_close(net.log_prob(mean, action), normal.log_prob(action).sum(-1))
    torch.testing.assert_close(net.entropy(), normal.entropy()[0].sum())


def test_values_come_back_in_the_units_of_the_returns() -> None:
    net = ActorCritic(4, 1)
    returns = torch.linspace(900.0, 1100.0, 101, dtype=torch.float64)
    net.returns.update(returns.unsqueeze(-1))
    scaled = net.scale_returns(returns)
    assert abs(scaled.mean().item()) < 1e-4
    assert abs(scaled.std(correction=0).item() - 1.0) < 1e-4
    x = torch.rand((5, 4))
    back = net.scaled_value(x).double() * returns.std(correction=0) + 1000.0
    torch.testing.assert_close(net.value(x), back, rtol=1e-6, atol=1e-4)
