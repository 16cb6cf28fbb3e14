"""What environments draw their episodes from: seeds, the reward by hand, the static reference."""

from __future__ import annotations

import dataclasses
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from envs import training_traces
from envs.serving.replay import replay
from envs.training_traces import SEEDS_FROM, TrainingTraces, reward
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.latency import tail_cost
from helm_rl.metrics import SHED_FACTOR
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace
from tests.envs.worlds import scenario, trace
from tests.helm_rl.test_observation import window


def test_reward_by_hand() -> None:
    small = scenario(reward={"move_cost": 0.5})
    costs = [0.2**4, 0.9**4, 1.5**4, 16 * (1 + math.log(15)), 16 * (1 + math.log(SHED_FACTOR / 2))]
    served = window(completed=5, tail_cost_sum=sum(tail_cost(ratio) for ratio in (0.2, 0.9, 1.5, 30.0, SHED_FACTOR)))
    expected = -0.5 * math.log1p(sum(costs) / 5 / 0.25)  # an interval of .5 s
    assert reward(served, small, 0.0) == pytest.approx(expected)
    assert reward(served, small, -0.1) == pytest.approx(expected - 0.05)
    assert reward(served, small, 0.1) == pytest.approx(expected - 0.05)


def test_a_window_in_which_nothing_ends_earns_nothing() -> None:
    idle = window(completed=0, tail_cost_sum=0.0)
    assert reward(idle, scenario(), 0.0) == 0.0


def test_training_never_sees_the_arrivals_of_an_evaluation() -> None:
    small = scenario(seconds=4)
    traces = TrainingTraces(small, count=3, seed=2)
    assert [traces.trace(i).meta.seed for i in range(3)] == [SEEDS_FROM + 6, SEEDS_FROM + 7, SEEDS_FROM + 8]
    others = {TrainingTraces(small, count=3, seed=seed).trace(0).meta.seed for seed in range(4)}
    assert others == {SEEDS_FROM + 3 * seed for seed in range(4)}
    assert traces.trace(1) is traces.trace(1)
    assert traces.trace(0).hash() != traces.trace(1).hash()
    assert traces.trace(0).hash() == generate(small, SEEDS_FROM + 6).hash()


def test_traces_are_made_once_by_whoever_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    barrier = threading.Barrier(4)

    def slow(small: Scenario, seed: int) -> Trace:
        made.append(seed)
        return generate(small, seed)

    monkeypatch.setattr(training_traces, "generate", slow)
    traces = TrainingTraces(scenario(seconds=4), count=2)

    def ask(k: int) -> Trace:
        barrier.wait()
        return traces.trace(k % 2)

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(ask, range(4)))
    assert sorted(made) == [SEEDS_FROM, SEEDS_FROM + 1]
    assert got[0] is got[2]
    assert got[1] is got[3]


def test_the_reference_is_what_a_static_half_earns() -> None:
    """Interval by interval of the measured part, warm from the start of the trace."""
    made = trace(np.arange(-2000.0, 5200.0, 25.0).tolist(), user=(np.arange(288) % 40).tolist(), history=300)
    small = scenario()
    traces = TrainingTraces(small, [made])
    assert traces.intervals(0) == 10  # 5.175 s in intervals of .5 s
    reference = traces.reference(0)
    result = replay(small, made, StaticAlpha(0.5))
    expected = [reward(w, small, 0.0) for w in result.windows if w.start_ns >= 0]
    assert reference == pytest.approx(expected[:10])
    assert np.std(reference) > 0
    assert traces.reference(0) is reference


def test_a_trace_that_is_all_warm_up_has_no_interval() -> None:
    made = trace([0.0, 1000.0, 1100.0], measure_from_ms=1000.0)
    assert TrainingTraces(scenario(), [made]).intervals(0) == 0
    assert TrainingTraces(scenario(), [made]).reference(0).size == 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="at least one is needed"):
        TrainingTraces(scenario(), [])
    with pytest.raises(UserError, match="must be at least 1, got 0"):
        TrainingTraces(scenario(), count=0)
    empty = dataclasses.replace(trace([0.0]), arrival_ns=np.zeros(0, np.int64))
    with pytest.raises(UserError, match="has no requests"):
        TrainingTraces(scenario(), [empty])
