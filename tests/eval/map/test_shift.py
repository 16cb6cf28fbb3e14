from __future__ import annotations

import numpy as np
import pytest

from eval.map.grid import Grid, Setting
from eval.map.shift import PLAYS, Shift, kept_times, search
from helm_rl.metrics import p99_ms
from helm_rl.workloads.generate import generate
from tests.eval.map.fakes import BEST, FakePlayer

SETTING = Setting("decoder-0.2b", "remote-ps", 0.0, 1500.0, 0.5)
S = 1_000_000_000


@pytest.fixture(scope="module")
def player() -> FakePlayer:
    scenario = Grid().scenario(SETTING, 60.0)
    return FakePlayer(scenario, generate(scenario, seed=1))


def static_ms(player: FakePlayer, alpha: float) -> float:
    latency_ms = player.play(player.static(alpha))
    assert latency_ms is not None
    return p99_ms(latency_ms[player.part.first :])


def test_a_ramp_goes_in_equal_steps_on_whole_seconds_after_the_start() -> None:
    start_ns = -30 * S + 400_000_000
    steps = Shift(0.6, 0.2, 0.2, go_s=-10, go_ramp_s=16).schedule(start_ns, 1.0)
    assert [alpha for _, alpha in steps] == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2])
    # The burst starts at 60 s, the change 10 s before; decisions fall .4 s after whole seconds.
    assert [(time_ns - start_ns) % S for time_ns, _ in steps] == [0] * 5
    assert [time_ns / S for time_ns, _ in steps[1:]] == pytest.approx([50.4, 54.4, 58.4, 62.4])


def test_a_return_begins_at_the_end_of_the_burst_and_half_the_pace_halves_the_times() -> None:
    shift = Shift(0.6, 0.2, 0.5, go_s=0, go_ramp_s=0, return_s=20, return_ramp_s=0)
    assert shift.schedule(-30 * S, 1.0) == ((-30 * S, 0.6), (60 * S, 0.2), (160 * S, 0.5))
    assert shift.schedule(-15 * S, 0.5) == ((-15 * S, 0.6), (30 * S, 0.2), (80 * S, 0.5))
    assert kept_times(-30 * S, 1.0) == [40 * S, 140 * S]


def test_the_shift_that_serves_both_segments_best_is_found(player: FakePlayer) -> None:
    # Halfway between .2 and .6, every request takes exp(10 * .2**2) = 1.49 times as long as it need.
    best_ms = static_ms(player, 0.4)
    assert best_ms == pytest.approx(40 * np.exp(0.4), rel=1e-5)
    shift, found_ms = search(player, 0.4, best_ms, BEST["base"], BEST["burst"])  # type: ignore[arg-type]
    assert found_ms == pytest.approx(40.0, rel=1e-5)
    assert shift == Shift(0.6, 0.2, 0.6, 0.0, 0.0)


def test_it_takes_few_plays_and_none_is_played_twice(player: FakePlayer) -> None:
    best_ms = static_ms(player, 0.4)
    player.schedules.clear()
    search(player, 0.4, best_ms, 0.5, 0.3)  # type: ignore[arg-type]
    assert len(player.schedules) == len(set(player.schedules)) <= PLAYS + 2


def test_without_a_better_shift_the_static_stands(player: FakePlayer) -> None:
    # 40 ms is the least that any schedule can have.
    assert search(player, 0.4, 40.0, 0.6, 0.2) == (None, 40.0)  # type: ignore[arg-type]


def test_a_known_shift_is_tried_first_and_saves_plays(player: FakePlayer) -> None:
    best_ms = static_ms(player, 0.4)
    player.schedules.clear()
    known = Shift(0.6, 0.2, 0.6, 0.0, 0.0)
    shift, found_ms = search(player, 0.4, best_ms, 0.9, 0.1, known)  # type: ignore[arg-type]
    assert player.schedules[0] == known.schedule(player.start_ns, 1.0)
    assert (shift, found_ms) == (known, pytest.approx(40.0, rel=1e-5))
