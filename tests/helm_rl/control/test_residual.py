"""The adapter: nothing at first or without a bound, what the margins say within it, right gradients."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest

from helm_rl.control.base import BasePolicy
from helm_rl.control.guard import GuardSettings
from helm_rl.control.residual import Residual, ResidualNet, ResidualSettings
from helm_rl.errors import UserError
from helm_rl.observation import SIZE
from tests.helm_rl.policies import make_bundle, network
from tests.helm_rl.test_observation import window

ALWAYS = GuardSettings(block=2, settle=0, probation=10**6, share=0.01)


@pytest.fixture
def base(tmp_path: Path) -> BasePolicy:
    make_bundle(tmp_path / "b", network(3))
    return BasePolicy.load(tmp_path / "b")


def observation(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(0, 1, SIZE).astype(np.float32)


def test_the_gradient_is_that_of_the_output() -> None:
    net = ResidualNet(5, 4, 1)
    rng = np.random.default_rng(2)
    net.weights[2] = rng.standard_normal((4, 1))
    x = rng.standard_normal(5)
    before, layers = net.forward(x)
    ascended = copy.deepcopy(net)
    ascended.ascend(layers, 1.0, 1.0)
    for kind in ("weights", "biases"):
        for i, array in enumerate(getattr(net, kind)):
            for at in np.ndindex(array.shape):
                nudged = copy.deepcopy(net)
                getattr(nudged, kind)[i][at] += 1e-6
                slope = (nudged.forward(x)[0] - before) / 1e-6
                assert getattr(ascended, kind)[i][at] - array[at] == pytest.approx(slope, rel=1e-3, abs=1e-6)


def test_without_a_bound_it_is_the_base_bit_for_bit(base: BasePolicy) -> None:
    layered = Residual(base, ResidualSettings(bound=0.0))
    rng = np.random.default_rng(1)
    seen = [observation(rng) for _ in range(50)]
    layered.reset(0)
    got = []
    for i, obs in enumerate(seen):
        layered.feedback(window(emb_margin_ms=1.0, kv_margin_ms=0.1))
        got.append(layered.decide(obs, 0.4, i))
    base.reset(0)
    assert got == [base.decide(obs, 0.4, i) for i, obs in enumerate(seen)]


def test_it_starts_at_nothing_and_learns_what_the_margins_say_within_its_bound(base: BasePolicy) -> None:
    rng = np.random.default_rng(1)
    for emb, kv, sign in ((1.0, 0.1, 1), (0.1, 1.0, -1)):
        adapter = Residual(base, ResidualSettings(bound=0.05), ALWAYS)
        offsets = []
        for i in range(600):
            target = adapter.decide(observation(rng), 0.5, i)
            offsets.append(adapter.offset)
            assert 0.1 <= target <= 0.9
            adapter.feedback(window(emb_margin_ms=emb, kv_margin_ms=kv, returning=0))
        acting = [each for each in offsets if each != 0.0]
        assert abs(offsets[0]) == 0.0
        assert max(abs(each) for each in offsets) <= 0.05
        assert sign * np.median(acting[-100:]) > 0.03
        adapter.reset(0)
        assert adapter.decide(observation(rng), 0.5, 0) == base.target


def test_the_base_sees_the_alpha_without_the_offset(base: BasePolicy) -> None:
    adapter = Residual(base, ResidualSettings(bound=0.05), ALWAYS)
    rng = np.random.default_rng(1)
    obs = observation(rng)
    adapter.decide(obs, 0.5, 0)
    adapter.offset = 0.03
    own = obs.copy()
    own[5] -= np.float32(0.03)
    target = base.target
    assert target is not None
    expected = target + float(np.clip(base.action(own)[0], -1, 1)) * base.step
    adapter.decide(obs, 0.53, 1)
    assert base.target == pytest.approx(min(max(expected, 0.1), 0.9), abs=1e-9)


def test_numbers_that_are_none_move_nothing(base: BasePolicy) -> None:
    adapter = Residual(base, guard=ALWAYS)
    rng = np.random.default_rng(1)
    bad = observation(rng)
    bad[3] = math.nan
    first = adapter.decide(observation(rng), 0.5, 0)
    adapter.feedback(window(emb_margin_ms=math.nan, kv_margin_ms=1.0, p99_ms=math.nan))
    assert math.isfinite(adapter.decide(bad, 0.5, 1))
    assert abs(adapter.decide(bad, 0.5, 2) - first) <= 0.05 + base.step
    weights = [each.copy() for each in adapter.net.weights]
    adapter.feedback(window(emb_margin_ms=0.0, kv_margin_ms=0.0))
    for one, other in zip(weights, adapter.net.weights, strict=True):
        np.testing.assert_array_equal(one, other)


def test_steps_are_longer_where_p99_has_left_its_average(base: BasePolicy) -> None:
    adapter = Residual(base, ResidualSettings(rate_gain=2.0))
    second = {"start_ns": 0, "end_ns": 1_000_000_000}
    assert adapter._urgency(window(p99_ms=50.0, **second)) == 1.0
    assert adapter._urgency(window(p99_ms=100.0, **second)) == pytest.approx(1 + 2 * 1.0)
    assert adapter._urgency(window(p99_ms=1e6, **second)) == 5.0


def test_what_was_learnt_survives_a_restart_only(base: BasePolicy) -> None:
    adapter = Residual(base, guard=ALWAYS)
    rng = np.random.default_rng(1)
    for i in range(100):
        adapter.decide(observation(rng), 0.5, i)
        adapter.feedback(window(emb_margin_ms=1.0, kv_margin_ms=0.01))
    learnt = adapter.net.weights[2].copy()
    assert np.abs(learnt).max() > 0
    adapter.restart(1)
    np.testing.assert_array_equal(adapter.net.weights[2], learnt)
    assert base.target is None
    adapter.reset(1)
    assert np.abs(adapter.net.weights[2]).max() == 0


@pytest.mark.parametrize(("field", "value"), [("bound", 0.6), ("hidden", 0), ("pull", math.nan), ("balance_hot", 11.0)])
def test_settings_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"residual adapter: {field} must be within"):
        ResidualSettings(**{field: value})  # type: ignore[arg-type]
