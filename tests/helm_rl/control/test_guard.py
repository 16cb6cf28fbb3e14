"""The guard: what helps goes on, what harms or proves nothing is switched off for a while."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from helm_rl.control.guard import GuardSettings, SwitchbackGuard
from helm_rl.errors import UserError
from helm_rl.metrics import WindowStats
from tests.helm_rl.test_observation import window

Takes = Callable[[bool], float]


def serve(
    guard: SwitchbackGuard, intervals: int, cost: Takes, busy: Takes, seed: int = 1, claimed: Takes | None = None
) -> list[bool]:
    """Run a guard; cost and busy (ms): what a request takes with and without the learner. Return when it acted.

    claimed: what the feedback has in the place of busy.
    """
    rng = np.random.default_rng(seed)
    acted = []
    for _ in range(intervals):
        acted.append(guard.on)
        noise = rng.lognormal(0, 0.1)
        window = measured(cost(guard.on) * rng.lognormal(0, 0.3), (claimed or busy)(guard.on) * noise)
        guard.take(window, busy(guard.on) * noise / 100)
    return acted


def measured(tail_cost: float, busy_ms: float) -> WindowStats:
    return window(
        arrivals=100,
        completed=100,
        tail_cost_sum=100 * tail_cost,
        link_busy_ns=round(100 * busy_ms * 1e6),
        compute_busy_ns=0,
    )


def test_blocks_come_in_pairs_of_either_kind() -> None:
    guard = SwitchbackGuard(GuardSettings(block=4, settle=1, probation=1000))
    acted = serve(guard, 4 * 200, lambda on: 0.2, lambda on: 5.0)
    blocks = np.array(acted).reshape(-1, 4)
    assert (blocks == blocks[:, :1]).all()  # nothing changes within a block
    assert (blocks[:, 0].reshape(-1, 2).sum(axis=1) == 1).all()
    first = blocks[::2, 0]
    assert 30 < first.sum() < 70  # by lot, so that no rhythm of the load can be taken for an effect


def test_what_helps_is_proven_and_then_acts_most_of_the_time() -> None:
    guard = SwitchbackGuard(GuardSettings(probation=20))
    acted = serve(guard, 4_000, lambda on: 0.18 if on else 0.2, lambda on: 4.7 if on else 5.0)
    assert guard.proven
    assert guard.tripped == 0
    assert np.mean(acted[:400]) == 0.5
    assert np.mean(acted[-2_000:]) == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(
    ("cost", "busy"),
    [
        (lambda on: 0.2, lambda on: 5.0),  # it changes nothing
        (lambda on: 0.3 if on else 0.2, lambda on: 4.5 if on else 5.0),  # less work, but a longer tail
        (lambda on: 0.2, lambda on: 5.5 if on else 5.0),  # more work
    ],
)
def test_what_harms_or_proves_nothing_is_switched_off(
    cost: Callable[[bool], float], busy: Callable[[bool], float]
) -> None:
    off, acted = 0, []
    for seed in range(20):
        guard = SwitchbackGuard(seed=seed)
        acted.append(np.mean(serve(guard, 3_000, cost, busy, seed)))
        off += guard.tripped > 0
    assert off >= 17
    assert np.mean(acted) < 0.4


def test_feedback_that_contradicts_the_observation_proves_nothing() -> None:
    rng = np.random.default_rng(1)
    for claimed in (lambda on: 5.0, lambda on: rng.uniform(4, 6), lambda on: 5.3 if on else 5.0):
        off = 0
        for seed in range(10):
            guard = SwitchbackGuard(seed=seed)
            serve(guard, 3_000, lambda on: 0.2, lambda on: 4.7 if on else 5.0, seed, claimed)
            off += guard.tripped > 0
        assert off >= 8
    guard = SwitchbackGuard(GuardSettings(probation=2))
    for _ in range(500):
        guard.take(measured(0.2, 4.0 if guard.on else 5.0), float("nan"))
    assert not guard.proven


def test_rest_is_longer_each_time_and_what_was_before_is_forgotten() -> None:
    settings = GuardSettings(block=4, settle=1, probation=4, rest=50)
    guard = SwitchbackGuard(settings)
    acted = np.array(serve(guard, 1_500, lambda on: 0.4 if on else 0.2, lambda on: 6.0 if on else 5.0))
    assert guard.tripped >= 3
    changes = np.flatnonzero(np.diff(np.concatenate([[True], acted, [True]]).astype(int)))
    pauses = np.diff(changes)[::2]  # from off to on again
    for least, pause in zip((50, 100, 200), pauses[pauses >= 40], strict=False):
        assert least <= pause <= least + 16


def test_windows_without_requests_prove_nothing() -> None:
    guard = SwitchbackGuard(GuardSettings(probation=2))
    idle = window(arrivals=0, completed=0, tail_cost_sum=0.0)
    for _ in range(500):
        guard.take(idle, 0.05)
    assert guard.tripped == 0
    assert not guard.proven


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("settle", 10, "settle must be at least 0 and below block = 10, not 10"),
        ("probation", 0, "probation must be at least 1, not 0"),
        ("harm", float("nan"), "harm must be a number of at least 0, not nan"),
        ("share", 0.6, r"share must be above 0 and at most \.5, not 0\.6"),
    ],
)
def test_settings_out_of_range_are_named(field: str, value: float, message: str) -> None:
    with pytest.raises(UserError, match=f"guard: {message}"):
        GuardSettings(**{field: value})  # type: ignore[arg-type]
