"""The compiled normaliser: torch's own, bit for bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from helm_rl.control.policy_net import CLIP, Normaliser
from train.normalising import Normalising


@pytest.mark.parametrize(("n", "dtype"), [(1, np.float64), (8, np.float32), (13, np.float64)])
def test_it_is_the_normaliser(n: int, dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(n)
    normaliser = Normaliser(5)
    twin = copy.deepcopy(normaliser)
    normalising, out = Normalising(normaliser), np.zeros((n, 5), np.float32)
    for _ in range(20):
        obs = (rng.normal(size=(n, 5)) * [1, 10, 1e-3, 0, 3] + [0, 1e6, 5, 2, 0]).astype(dtype)
        obs[0, 4] = 1e9 * rng.integers(2)  # beyond the clip at times
        normalising(obs, out)
        twin.update(torch.from_numpy(obs))
        for name, value in twin.state_dict().items():
            assert torch.equal(normaliser.state_dict()[name], value), name
        assert torch.equal(torch.from_numpy(out), twin(torch.from_numpy(obs)))
    assert normaliser.count.item() == 20 * n
    assert np.abs(out).max() <= CLIP
