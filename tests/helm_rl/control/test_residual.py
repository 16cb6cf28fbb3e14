"""The adapter: nothing at first or without a bound, what latency says within it, and gradients that are right."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest

from helm_rl.control.base import BasePolicy
from helm_rl.control.guard import GuardSettings, Mode, Verdict
from helm_rl.control.protocol import Resuming
from helm_rl.control.residual import Residual, ResidualNet, ResidualSettings
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from helm_rl.observation import SIZE
from tests.helm_rl.control.test_guard import measured
from tests.helm_rl.policies import make_bundle, network

TRYING = GuardSettings(probation=10**6)


@pytest.fixture
def base(tmp_path: Path) -> BasePolicy:
    make_bundle(tmp_path / "b", network(3))
    return BasePolicy.load(tmp_path / "b")


def observation(rng: np.random.Generator) -> np.ndarray:
    return rng.uniform(0, 1, SIZE).astype(np.float32)


def test_the_gradient_is_that_of_the_output_before_its_tanh() -> None:
    net = ResidualNet(5, 4, 1)
    rng = np.random.default_rng(2)
    net.weights[2][...] = rng.standard_normal((4, 1))
    x = rng.standard_normal(5)
    before = math.atanh(net.forward(x))
    ascended = copy.deepcopy(net)
    ascended.ascend(x, 2.0, 1.0)
    for kind in ("weights", "biases"):
        for i, array in enumerate(getattr(net, kind)):
            for at in np.ndindex(array.shape):
                nudged = copy.deepcopy(net)
                getattr(nudged, kind)[i][at] += 1e-6
                slope = (math.atanh(nudged.forward(x)) - before) / 1e-6
                assert getattr(ascended, kind)[i][at] - array[at] == pytest.approx(2 * slope, rel=1e-3, abs=1e-6)


def test_without_a_bound_it_is_the_base_bit_for_bit(base: BasePolicy) -> None:
    layered = Residual(base, ResidualSettings(bound=0.0))
    rng = np.random.default_rng(1)
    seen = [observation(rng) for _ in range(200)]
    got = []
    for i, obs in enumerate(seen):
        layered.feedback(measured(100, 0.2))
        got.append(layered.decide(obs, 0.4, i))
    base.reset(0)
    assert got == [base.decide(obs, 0.4, i) for i, obs in enumerate(seen)]


def run(adapter: Residual, intervals: int, seed: int, gain: float) -> list[float]:
    """Serve intervals in which latency falls with the offset where the load is hot, and rises where it is cold."""
    rng = np.random.default_rng(seed)
    offsets = []
    for i in range(intervals):
        hot = (i // 200) % 2
        obs = np.full(SIZE, 0.5, np.float32)
        obs[0] = hot
        cost = 0.2 * rng.lognormal(0, 0.5)
        target = adapter.decide(obs, 0.5, i)
        assert 0.1 <= target <= 0.9
        offsets.append(adapter.offset)
        effect = math.exp(-gain * adapter.offset / 0.05 * (1 if hot else -1))
        obs[6] = min(0.2 * effect**0.25, 1.0)
        adapter.feedback(measured(100, cost * effect))
    return offsets


def test_it_starts_at_nothing_and_stays_within_its_bound(base: BasePolicy) -> None:
    adapter = Residual(base, ResidualSettings(bound=0.05), TRYING)
    assert adapter.net.forward(np.ones(SIZE + 1)) == 0.0
    offsets = np.array(run(adapter, 2_000, 1, 0.3))
    assert set(np.round(np.unique(offsets), 12)) == {-0.05, 0.0, 0.05}


def test_it_learns_which_side_is_better_by_the_load(base: BasePolicy) -> None:
    adapter = Residual(base, guard=TRYING)
    run(adapter, 6_000, 1, 0.3)
    hot, cold = np.full(SIZE, 0.5, np.float32), np.full(SIZE, 0.5, np.float32)
    hot[0], cold[0] = 1.0, 0.0
    says = [adapter.net.forward(np.append(base.normalised(each), 0.0).astype(np.float64)) for each in (hot, cold)]
    assert says[0] > 0.3
    assert says[1] < -0.3
    learnt = [each.copy() for each in adapter.net.weights]
    adapter.restart(1)
    np.testing.assert_array_equal(adapter.net.weights[2], learnt[2])
    assert base.target is None
    # As after a burst that recovery has steered through.
    run(adapter, 5, 2, 0.3)
    learnt = [each.copy() for each in adapter.net.weights]
    assert isinstance(adapter, Resuming)
    adapter.resume(0.31)
    np.testing.assert_array_equal(adapter.net.weights[2], learnt[2])
    assert (base.target, adapter.offset) == (None, 0.0)
    adapter.reset(1)
    assert np.abs(adapter.net.weights[2]).max() == 0


def test_the_base_sees_the_alpha_without_the_offset(base: BasePolicy) -> None:
    adapter = Residual(base, guard=TRYING)
    obs = observation(np.random.default_rng(1))
    adapter.decide(obs, 0.5, 0)
    adapter.offset = 0.03
    own = obs.copy()
    own[5] -= np.float32(0.03)
    before = base.target
    assert before is not None
    expected = before + float(np.clip(base.action(own)[0], -1, 1)) * base.step
    adapter.decide(obs, 0.53, 1)
    assert base.target == pytest.approx(min(max(expected, 0.1), 0.9), abs=1e-9)


def test_numbers_that_are_none_change_nothing(base: BasePolicy) -> None:
    adapter = Residual(base, guard=TRYING)
    rng = np.random.default_rng(1)
    bad = observation(rng)
    bad[3] = math.nan
    while adapter.guard.mode is not Mode.TRY:
        adapter.decide(observation(rng), 0.5, 0)
        adapter.feedback(measured(100, 0.2))
    adapter.decide(observation(rng), 0.5, 1)
    offset = adapter.offset
    assert offset != 0.0
    assert math.isfinite(adapter.decide(bad, 0.5, 2))
    assert adapter.offset == offset


def test_steps_are_longer_where_p99_has_left_its_average(base: BasePolicy) -> None:
    adapter = Residual(base, ResidualSettings(rate_gain=2.0))
    for p99_ms, expected in ((50.0, 1.0), (100.0, 1 + 2 * 1.0), (1e6, 5.0), (math.nan, 5.0)):
        one = measured(100, 0.2)
        adapter.feedback(type(one)(**{f: getattr(one, f) for f in one.__slots__} | {"p99_ms": p99_ms}))
        assert adapter._urgency == pytest.approx(expected, rel=0.02)


def test_a_block_that_something_else_steered_through_teaches_nothing(base: BasePolicy) -> None:
    """Else what was measured with one side would be put down to the side drawn after the interruption."""
    adapter = Residual(base, guard=TRYING)
    obs = np.full(SIZE, 0.5, np.float32)
    rng = np.random.default_rng(1)
    counted: list[list[float]] = []  # offsets of the windows that each verdict is about
    offsets: list[float] = []
    taken = adapter.guard.take

    def take(window: WindowStats, observed: float) -> Verdict | None:
        offsets.append(adapter.offset)
        verdict = taken(window, observed)
        if verdict is not None:
            counted.append(offsets[-14:])
        return verdict

    adapter.guard.take = take  # type: ignore[method-assign]
    for k in range(3_000):
        adapter.decide(obs, 0.5, k)
        adapter.feedback(measured(100, 0.2 * rng.lognormal()))
        if rng.random() < 0.02:
            adapter.resume(0.5)
    assert len(counted) > 50
    assert all(len(set(each)) == 1 for each in counted)


@pytest.mark.parametrize(("field", "value"), [("bound", 0.6), ("hidden", 0), ("pull", math.nan)])
def test_settings_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"residual adapter: {field} must be within"):
        ResidualSettings(**{field: value})  # type: ignore[arg-type]
