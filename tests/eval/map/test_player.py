from __future__ import annotations

import numpy as np
import pytest

from envs.serving.node import NodeSim
from envs.serving.replay import replay
from eval.map.player import SAMPLED_SLOTS, Player, Schedule
from helm_rl.control.schedule import ScheduledAlpha
from helm_rl.metrics import p99_ms
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace
from tests.envs.worlds import QUICK, scenario

S = 1_000_000_000


@pytest.fixture(scope="module")
def world() -> tuple[Scenario, Trace]:
    busy = scenario(**QUICK, hardware__link_gb_s=0.02, load__history_mean=600.0)
    return busy, generate(busy, seed=3)


def schedules(player: Player) -> tuple[Schedule, Schedule]:
    """Two that part at 6 s: one stays, the other comes back."""
    head = (player.start_ns, 0.6), (player.start_ns + 6 * S, 0.3)
    return head, (*head, (player.start_ns + 16 * S, 0.8))


def test_a_schedule_is_served_as_a_replay_serves_it(world: tuple[Scenario, Trace]) -> None:
    busy, trace = world
    player = Player(busy, trace)
    _, back = schedules(player)
    node = NodeSim(busy, trace, max_sampled_slots=SAMPLED_SLOTS)
    controller = ScheduledAlpha([time_ns for time_ns, _ in back], [alpha for _, alpha in back])
    expected = replay(busy, trace, controller, alpha0=0.6, node=node).latency_ms
    found = player.play(back)
    assert found is not None
    np.testing.assert_array_equal(found, expected)
    assert player.played == pytest.approx(1.0)


def test_what_schedules_share_is_served_once_and_changes_nothing(world: tuple[Scenario, Trace]) -> None:
    busy, trace = world
    fresh = Player(busy, trace)
    stays, back = schedules(fresh)
    expected = fresh.play(back)
    player = Player(busy, trace, keep_ns=[fresh.start_ns + 16 * S])
    player.play(stays)
    found = player.play(back)
    assert found is not None
    assert expected is not None
    np.testing.assert_array_equal(found, expected)
    after = (trace.arrival_ns >= fresh.start_ns + 16 * S).mean()
    assert player.played == pytest.approx(1.0 + after, abs=0.01)
    # Another alpha at the start is another way to 16 s.
    other = player.play(((player.start_ns, 0.2), (player.start_ns + 16 * S, 0.8)))
    assert player.played == pytest.approx(2.0 + after, abs=0.01)
    assert other is not None
    assert not np.array_equal(other, expected)


def test_a_schedule_is_given_up_exactly_when_its_p99_exceeds_the_limit(world: tuple[Scenario, Trace]) -> None:
    busy, trace = world
    player = Player(busy, trace)
    alone = player.play(player.static(0.5))
    assert alone is not None
    p99 = p99_ms(alone[player.part.first :])
    at_limit = player.play(player.static(0.5), p99)
    assert at_limit is not None
    np.testing.assert_array_equal(at_limit, alone)
    assert player.play(player.static(0.5), p99 * 0.999) is None
    played = player.played
    assert player.play(player.static(0.5), 0.3 * p99) is None
    assert player.played - played < 0.9  # it did not need the whole trace
