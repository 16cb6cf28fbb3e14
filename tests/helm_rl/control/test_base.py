"""The base policy in service: NumPy's actions are torch's, and what becomes of them."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from helm_rl.control.base import BasePolicy
from helm_rl.control.protocol import Controller
from helm_rl.observation import SIZE
from tests.helm_rl.policies import make_bundle, network, observations

STEP = 0.06 * 0.5  # the bundles' rate times their interval


@pytest.mark.parametrize("scale", [1.0, 1e5])
def test_numpy_gives_the_actions_of_torch(tmp_path: Path, scale: float) -> None:
    net = network(1, scale)
    make_bundle(tmp_path / "b", net)
    policy = BasePolicy.load(tmp_path / "b")
    # Beyond what was seen, too, where the normaliser clips.
    raw = observations(2, 300, scale * 3)
    with torch.no_grad():
        expected = net(raw).numpy()
    assert expected.std() > 0.1  # the comparison is not one of zeros
    got = np.stack([policy.action(row) for row in raw.numpy()])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_a_new_process_acts_the_same_bit_for_bit_and_without_torch(tmp_path: Path) -> None:
    # The normaliser is in the bundle: raw observations go in.
    net = network(3)
    make_bundle(tmp_path / "b", net)
    raw = observations(4, 20).numpy()
    np.save(tmp_path / "raw.npy", raw)
    code = (
        "import sys, numpy as np; from pathlib import Path; from helm_rl.control.base import BasePolicy;"
        "policy = BasePolicy.load(Path(sys.argv[1]));"
        "print(*[policy.action(row)[0].item().hex() for row in np.load(sys.argv[2])]);"
        "print('torch' in sys.modules)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "b"), str(tmp_path / "raw.npy")]
    out = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    here = BasePolicy.load(tmp_path / "b")
    assert out[0].split() == [here.action(row)[0].item().hex() for row in raw]
    assert out[1] == "False"


def test_the_target_moves_by_the_clipped_action_and_stays_within_the_bounds(tmp_path: Path) -> None:
    net = network(5)
    make_bundle(tmp_path / "b", net)
    policy = BasePolicy.load(tmp_path / "b")
    controller: Controller = policy
    controller.reset(0)
    target = 0.5
    actions = []
    for row in observations(6, 400).numpy():
        action = float(policy.action(row)[0])
        actions.append(action)
        target = float(np.clip(target + np.clip(action, -1, 1) * STEP, 0.1, 0.9))
        # From the second decision on, its own target counts, not what has been applied.
        applied = 0.5 if len(actions) == 1 else 0.77
        assert controller.decide(row, applied, 0) == pytest.approx(target, abs=1e-12)
    assert min(actions) < -1
    assert max(actions) > 1  # both ends of the action were clipped on the way


def test_it_starts_from_the_applied_alpha_and_reset_forgets(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", network(7))
    policy = BasePolicy.load(tmp_path / "b")
    row = observations(8, 1).numpy()[0]
    move = float(np.clip(policy.action(row)[0], -1, 1)) * STEP
    for start in (0.3, 0.6):
        policy.reset(0)
        assert policy.decide(row, start, 0) == pytest.approx(start + move)
    policy.reset(0)
    assert policy.decide(row, 0.97, 0) <= 0.9
    policy.reset(0)
    assert policy.decide(row, 0.0, 0) >= 0.1
    assert policy.tick(10**6, 1e9, 0) is False


def test_an_observation_that_is_not_finite_leaves_the_target_alone(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", network(9))
    policy = BasePolicy.load(tmp_path / "b")
    policy.reset(0)
    row = observations(10, 1).numpy()[0]
    before = policy.decide(row, 0.5, 0)
    for bad in (np.nan, np.inf):
        broken = row.copy()
        broken[4] = bad
        assert policy.decide(broken, 0.9, 0) == before
    assert policy.decide(row, 0.5, 0) != before


def test_a_network_that_overflows_leaves_the_target_within_the_bounds(tmp_path: Path) -> None:
    net = network(8)
    with torch.no_grad():
        for weight in net.actor.parameters():  # finite, each of them, and inf - inf in their sums
            weight[...] = torch.where(torch.arange(weight.numel()).view_as(weight) % 2 == 0, 3e38, -3e38)
    make_bundle(tmp_path / "b", net)
    policy = BasePolicy.load(tmp_path / "b")
    policy.reset(0)
    rows = observations(2, 20).numpy()
    with np.errstate(all="ignore"):
        assert np.isnan(policy.action(rows[0])).all()
    targets = [policy.decide(row, 0.4, 0) for row in rows]
    assert all(0.1 <= target <= 0.9 for target in targets), targets


def test_an_observation_of_another_shape_is_an_error(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", network(11))
    policy = BasePolicy.load(tmp_path / "b")
    with pytest.raises(ValueError, match=r"\(17,\), got \(7,\)"):
        policy.decide(np.zeros(7, np.float32), 0.5, 0)


def test_an_applied_alpha_that_is_no_number_does_not_stay(tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", network(1))
    policy = BasePolicy.load(tmp_path / "b")
    zeros = np.zeros(SIZE, np.float32)
    assert math.isnan(policy.decide(zeros, math.nan, 0))
    assert abs(policy.decide(zeros, 0.5, 1) - 0.5) <= policy.step
