"""A trace served under a controller: who is measured, and when decisions fall."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from envs.serving.node import NodeSim
from envs.serving.replay import Replay, replay
from helm_rl.control import burst
from helm_rl.control.burst import BurstSettings, look_at_all, new_burst_state
from helm_rl.control.recovery import Recovery, RecoveryRule
from helm_rl.control.static import StaticAlpha
from helm_rl.metrics import WindowStats
from helm_rl.observation import SIZE
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace
from tests.envs.worlds import QUICK, scenario, trace

SECOND = 1_000_000_000


class Recorder:
    """Asks for the targets it was given, in turn, and keeps what it is told."""

    def __init__(self, *targets: float) -> None:
        self.targets = targets
        self.calls: list[str] = []
        self.observations: list[npt.NDArray[np.float32]] = []
        self.applied: list[float] = []
        self.times: list[int] = []
        self.windows: list[WindowStats] = []

    def reset(self, seed: int) -> None:
        self.calls.append(f"reset {seed}")

    def decide(self, observation: npt.NDArray[np.float32], applied_alpha: float, now_ns: int) -> float:
        self.calls.append("decide")
        self.observations.append(observation)
        self.applied.append(applied_alpha)
        self.times.append(now_ns)
        return self.targets[min(len(self.times), len(self.targets)) - 1]

    def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
        return False

    def feedback(self, window: WindowStats) -> None:
        self.calls.append("feedback")
        self.windows.append(window)


@pytest.fixture(scope="module")
def load() -> tuple[Scenario, Trace]:
    small = scenario(seconds=8, warm_s=2)
    return small, generate(small)


def same(a: Replay, b: Replay) -> bool:
    return (
        np.array_equal(a.latency_ms, b.latency_ms)
        and a.windows == b.windows
        and np.array_equal(a.alpha, b.alpha)
        and np.array_equal(a.target, b.target)
    )


def test_a_decision_falls_at_the_end_of_every_interval(load: tuple[Scenario, Trace]) -> None:
    small, made = load
    recorder = Recorder(0.3, 0.7)
    ends: list[int] = []
    result = replay(small, made, recorder, alpha0=0.4, seed=11, advance=ends.append)

    start = int(made.arrival_ns[0])
    expected = np.arange(start + SECOND // 2, int(made.arrival_ns[-1]) + 1 + SECOND // 2, SECOND // 2)
    assert recorder.times == expected.tolist() == ends
    assert recorder.calls == ["reset 11"] + ["feedback", "decide"] * len(expected)
    assert result.time_s == pytest.approx(expected * 1e-9)
    assert recorder.windows == result.windows
    assert all(observation.shape == (SIZE,) for observation in recorder.observations)
    assert recorder.applied == [window.alpha for window in result.windows]
    # A decision is in force from the next interval on.
    assert result.target[:3] == pytest.approx([0.4, 0.3, 0.7])
    # 256 pages; half a second moves 100 of them.
    assert (result.alpha[:3] * 256).tolist() == [102, 77, 177]
    assert 0 < result.decide_us < 1e5


def test_warm_up_is_served_but_not_measured(load: tuple[Scenario, Trace]) -> None:
    small, made = load
    result = replay(small, made, StaticAlpha(0.5))
    assert np.isfinite(result.latency_ms).all()
    assert result.measured.tolist() == (made.arrival_ns >= 0).tolist()
    assert 0 < np.count_nonzero(~result.measured) < len(made) / 2


def test_a_later_start_of_measurement() -> None:
    made = trace([0.0, 500.0, 999.0, 1000.0, 2500.0], measure_from_ms=1000.0)
    result = replay(scenario(), made, StaticAlpha(0.5))
    assert result.measured.tolist() == [False, False, False, True, True]
    assert np.isfinite(result.latency_ms).all()
    assert result.time_s[:2] == pytest.approx([0.5, 1.0])


def test_a_target_that_is_not_a_number_is_ignored(load: tuple[Scenario, Trace]) -> None:
    small, made = load
    result = replay(small, made, Recorder(0.3, math.nan, math.inf, -math.inf, 0.6))
    assert result.target[:6] == pytest.approx([0.5, 0.3, 0.3, 0.3, 0.3, 0.6])
    assert np.isfinite(result.latency_ms).all()


def test_windows_that_nobody_reads_need_not_be_kept(load: tuple[Scenario, Trace]) -> None:
    kept, light = (replay(*load, Recorder(0.3, 0.8), keep_windows=keep) for keep in (True, False))
    assert light.windows == []
    assert same(replace(light, windows=kept.windows), kept)
    assert light.time_s.tolist() == [window.end_ns * 1e-9 for window in kept.windows]


def test_targets_are_clipped(load: tuple[Scenario, Trace]) -> None:
    assert replay(*load, Recorder(7.0, -7.0)).target[1:3] == pytest.approx([0.9, 0.1])


def test_a_node_can_be_used_again(load: tuple[Scenario, Trace]) -> None:
    small, made = load
    fresh = replay(small, made, Recorder(0.3, 0.8), alpha0=0.6)
    node = NodeSim(small, made, 0.2)
    node.set_target(0.9)
    node.run(3 * SECOND)
    assert same(replay(small, made, Recorder(0.3, 0.8), alpha0=0.6, node=node), fresh)
    kept = fresh.latency_ms.copy()
    replay(small, made, StaticAlpha(0.1), node=node)
    assert np.array_equal(fresh.latency_ms, kept)


def test_two_threads_serve_as_one_does(load: tuple[Scenario, Trace]) -> None:
    alphas = [0.1, 0.4, 0.7, 0.9]
    one = [replay(*load, StaticAlpha(alpha), alpha0=alpha) for alpha in alphas]
    with ThreadPoolExecutor(2) as pool:
        two = list(pool.map(lambda alpha: replay(*load, StaticAlpha(alpha), alpha0=alpha), alphas))
    assert all(same(a, b) for a, b in zip(one, two, strict=True))
    assert not same(one[0], one[1])


def test_an_interval_longer_than_the_trace_makes_one_window() -> None:
    made = trace([0.0, 500.0])
    recorder = Recorder(0.3)
    result = replay(scenario(control__interval_s=10), made, recorder)
    assert [window.arrivals for window in result.windows] == [2]
    assert result.time_s.tolist() == [10.0]
    assert np.isfinite(result.latency_ms).all()


def test_short_intervals(load: tuple[Scenario, Trace]) -> None:
    """5 ms, the shortest: latencies under a static split do not depend on the interval."""
    small, made = load
    short = scenario(seconds=8, warm_s=2, control__interval_s=0.005, control__tick_s=0.005)
    assert np.array_equal(
        replay(short, made, StaticAlpha(0.5)).latency_ms, replay(small, made, StaticAlpha(0.5)).latency_ms
    )


def test_a_burst_is_decided_upon_at_the_tick_at_which_it_is_found() -> None:
    phase = {"start_s": 6.0, "seconds": 8.0, "rate": 240.0, "requests_per_visit": 3.0, "label": "burst"}
    world = scenario(**{**QUICK, "control__interval_s": 2.0, "load__phase": (phase,), "seconds": 26.0})
    load = generate(world, 1)
    settings = BurstSettings(least_s=4.0, calm_s=1.0, threshold=12.0, p99_sigmas=1e9)
    recovery = Recovery(StaticAlpha(0.5), RecoveryRule(0.2, 0.2), settings)
    run = replay(world, load, recovery, alpha0=0.5)

    # The same detector over the same ticks by itself.
    ticks = np.arange(run.windows[0].start_ns, load.arrival_ns[-1] + 10_000_000, 10_000_000)
    arrivals = np.histogram(load.arrival_ns, ticks)[0].astype(np.int64)
    found = np.zeros(arrivals.size, np.bool_)
    look_at_all(new_burst_state(settings), arrivals, np.zeros(0), found)
    (first,) = np.flatnonzero(found)
    fired_ns = int(ticks[first + 1])
    assert 6.0 < fired_ns * 1e-9 < 7.5

    ends = [window.end_ns for window in run.windows]
    assert fired_ns in ends
    at = ends.index(fired_ns)
    assert run.target[at] == 0.5  # until then
    assert run.target[at + 1] == np.float32(0.2)
    assert ends[at + 1] - fired_ns == 2_000_000_000  # the next interval is a whole one
    assert run.target[-1] == 0.5  # handed back
    assert sum(window.arrivals for window in run.windows) == len(load)


def test_the_detector_shows_in_the_observation_of_every_controller_and_stops_only_its_own() -> None:
    phase = {"start_s": 16.0, "seconds": 8.0, "rate": 240.0, "requests_per_visit": 3.0, "label": "burst"}
    world = scenario(**{**QUICK, "load__phase": (phase,), "seconds": 26.0})
    load = generate(world, 1)
    recorder = Recorder(0.4)
    run = replay(world, load, recorder, alpha0=0.4)
    scores = {
        window.end_ns: observation[16] for window, observation in zip(run.windows, recorder.observations, strict=True)
    }
    assert all(window.end_ns - window.start_ns == SECOND // 2 for window in run.windows)
    assert max(score for end_ns, score in scores.items() if end_ns <= 16 * SECOND) < 0.5
    assert min(score for end_ns, score in scores.items() if 17 * SECOND <= end_ns <= 23 * SECOND) > 0.5
    # What it sees does not hang on the controller, nor does it change what is served.
    node = NodeSim(world, load, 0.4)
    windows = [node.run(window.end_ns) for window in run.windows]
    assert [replace(window, burst_score=0.0) for window in run.windows] == windows


@pytest.mark.parametrize("interval_s", [0.005, 0.035, 1.0])
def test_ticks_go_on_from_interval_to_interval(interval_s: float) -> None:
    """Whether or not an interval is a whole number of them."""
    world = scenario(**{**QUICK, "seconds": 8.0, "control__interval_s": interval_s, "control__tick_s": 0.005})
    load = generate(world, 1)
    node, state = NodeSim(world, load, 0.5), new_burst_state(BurstSettings())
    start = node.now_ns
    while node.now_ns < node.end_ns:
        node.run(node.now_ns + round(interval_s * 1e9), state)
    ticks = np.arange(start, node.now_ns + 1, 10_000_000)
    assert state.counts[burst.TICKS] == ticks.size - 1
    totals = np.searchsorted(load.arrival_ns, ticks[1:])
    last = np.arange(ticks.size - 301, ticks.size - 1)
    assert np.array_equal(state.recent[(last + 1) % state.recent.size], totals[last])


def test_ticks_that_find_nothing_change_nothing() -> None:
    world = scenario(**{**QUICK, "seconds": 6.0})
    load = generate(world, 1)
    never = BurstSettings(threshold=1e9, p99_sigmas=1e9)
    watched = replay(world, load, Recovery(StaticAlpha(0.4), RecoveryRule(0.2, 0.2), never), alpha0=0.5)
    plain = replay(world, load, StaticAlpha(0.4), alpha0=0.5)
    assert np.array_equal(watched.latency_ms, plain.latency_ms)
    assert [replace(w, burst_score=0.0) for w in watched.windows] == [
        replace(w, burst_score=0.0) for w in plain.windows
    ]


def test_busy_shares_are_those_of_the_measured_intervals(load: tuple[Scenario, Trace]) -> None:
    small, arrivals = load
    found = replay(small, arrivals, StaticAlpha(0.5))
    measured = [window for window in found.windows if window.end_ns > arrivals.meta.measure_from_ns]
    assert 0 < len(measured) < len(found.windows)
    seconds = sum(window.length_ns for window in measured) * 1e-9
    assert found.link_busy == pytest.approx(sum(window.link_busy_ns for window in measured) * 1e-9 / seconds)
    assert found.compute_busy == pytest.approx(sum(window.compute_busy_ns for window in measured) * 1e-9 / seconds)
    assert 0 < found.compute_busy != found.link_busy > 0
    without = replay(small, arrivals, StaticAlpha(0.5), keep_windows=False)
    assert (without.link_busy, without.compute_busy) == (found.link_busy, found.compute_busy)
