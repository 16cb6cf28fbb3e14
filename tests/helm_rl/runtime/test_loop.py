"""The control loop: on time, within bounds, and never upset by what it reads."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helm_rl.control.burst import BurstSettings
from helm_rl.control.recovery import Recovery, RecoveryRule
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.observation import OBSERVATION_NAMES, SIZE
from helm_rl.runtime.adapters.scripted import Line, ScriptedAdapter
from helm_rl.runtime.counters import Cause, Counters, Latencies, StaleTelemetry
from helm_rl.runtime.loop import ControlLoop, Step
from helm_rl.runtime.steering import Steering
from tests.helm_rl.runtime.feeds import SECOND, FakeClock, Recorded, spoilt, steady

ALPHA, BURST = OBSERVATION_NAMES.index("alpha"), OBSERVATION_NAMES.index("burst_score")


def control(
    script: list[Line], controller: Any = None, intervals: int | None = None, period_s: float = math.inf, **options: Any
) -> tuple[ControlLoop, ScriptedAdapter, Recorded]:
    """Run a loop over a script, one line for the start and one for each interval of a second."""
    recorded = Recorded(0.6) if controller is None else controller
    adapter = ScriptedAdapter(script, period_s)
    clock = FakeClock((len(script) - 1 if intervals is None else intervals) + 0.001)
    loop = ControlLoop(adapter, recorded, 1.0, slo_ms=50.0, clock=clock, **options)
    run(loop, clock)
    return loop, adapter, recorded


def run(loop: ControlLoop, clock: FakeClock) -> None:
    """Run a loop to the end of its clock; each target is applied before the clock moves on."""
    clock.busy = lambda: not loop._applier.idle
    loop.run(threading.Event())


def fallbacks(loop: ControlLoop) -> dict[Cause, int]:
    return dict(loop.status.fallbacks)


def test_each_interval_is_observed_decided_and_applied() -> None:
    loop, adapter, recorded = control([steady(k) for k in range(6)], Recorded(0.51, 0.52, 0.53, 0.54, 0.55))
    assert [alpha for alpha, _ in adapter.applied] == [0.51, 0.52, 0.53, 0.54, 0.55]
    assert [window.arrivals for window in recorded.windows] == [100] * 5
    assert (loop.status.intervals, loop.status.decisions, loop.status.missed) == (5, 5, 0)
    assert fallbacks(loop) == {}
    assert loop.status.masked == ()
    revisions = [revision for _, revision in adapter.applied]
    assert revisions == sorted(set(revisions))


def test_the_observation_has_what_is_applied_and_not_what_was_asked_for() -> None:
    script: list[Line] = [steady(k, alpha=0.3 + 0.01 * k) for k in range(4)]
    _, _, recorded = control(script, Recorded(0.9))
    assert recorded.alphas == pytest.approx([0.31, 0.32, 0.33])
    assert [float(x[ALPHA]) for x in recorded.observations] == pytest.approx([0.31, 0.32, 0.33])
    assert [window.target for window in recorded.windows] == pytest.approx([0.31, 0.9, 0.9])


def test_where_counters_do_not_say_what_is_applied_the_answers_do() -> None:
    loop, adapter, recorded = control([steady(k, alpha=None) for k in range(4)], Recorded(0.7, 0.6, 0.65), alpha0=0.25)
    assert recorded.alphas == [0.25, 0.7, 0.6]
    assert len(adapter.applied) == 3
    assert fallbacks(loop) == {}


def test_where_nobody_says_what_is_applied_nothing_is_asked_for() -> None:
    loop, adapter, recorded = control([steady(k, alpha=None) for k in range(4)])
    assert fallbacks(loop) == {Cause.NO_ALPHA: 3}
    assert adapter.applied == recorded.observations == []


def test_pacing_does_not_drift() -> None:
    """Decisions that take their time are followed by shorter waits, and all fall on whole intervals."""
    clock = FakeClock(50.001)
    steps: list[int] = []

    class Slow(Recorded):
        def decide(self, observation: Any, applied_alpha: float, now_ns: int) -> float:
            steps.append(now_ns)
            clock.time_ns += 123_456_789
            return 0.5

    start = clock.time_ns
    loop = ControlLoop(ScriptedAdapter([steady(k) for k in range(60)]), Slow(0.5), 1.0, slo_ms=50.0, clock=clock)
    run(loop, clock)
    assert steps == [start + k * SECOND for k in range(1, 51)]
    assert loop.status.missed == 0


def test_what_was_slept_through_is_counted_and_not_made_up_for() -> None:
    clock = FakeClock(20.001)
    seen: list[int] = []

    class Suspended(Recorded):
        def decide(self, observation: Any, applied_alpha: float, now_ns: int) -> float:
            seen.append((now_ns - start) // SECOND)
            if len(seen) == 3:
                clock.time_ns += 4 * SECOND + SECOND // 2
            return 0.5

    start = clock.time_ns
    script: list[Line] = [lambda: steady((clock.time_ns - start) // SECOND)] * 30
    loop = ControlLoop(ScriptedAdapter(script), Suspended(0.5), 1.0, slo_ms=50.0, clock=clock)
    run(loop, clock)
    assert seen[:5] == [1, 2, 3, 7, 8]
    assert (loop.status.missed, loop.status.intervals) == (3, 17)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (StaleTelemetry("nobody answers"), Cause.UNREACHABLE),
        (StaleTelemetry("too large", Cause.MALFORMED), Cause.MALFORMED),
        (KeyError("bug"), Cause.ADAPTER),
        (steady(3, rows=math.nan), Cause.NOT_FINITE),
        (steady(3, queue=-1.0), Cause.ABSURD),
        (steady(3, arrivals=0.0), Cause.BACKWARDS),
        (steady(3, clock_s=2.0), Cause.STALE),
        (steady(3, arrivals=None), Cause.MISSING),
        (steady(3, rows="many"), Cause.ADAPTER),
        (steady(3, latency=Latencies([20.0], [1.0])), Cause.MALFORMED),  # type: ignore[arg-type]
        (lambda: {"arrivals": 300.0}, Cause.ADAPTER),  # type: ignore[list-item, return-value]
        (lambda: sys.exit(1), Cause.ADAPTER),
    ],
)
def test_a_bad_reading_leaves_alpha_alone_and_is_counted_once(line: Line, cause: Cause) -> None:
    steps: list[Step] = []
    script: list[Line] = [steady(0), steady(1), steady(2), line, steady(4), steady(5)]
    loop, adapter, recorded = control(script, watch=steps.append)
    assert fallbacks(loop) == {cause: 1}
    assert dict(loop.status.refused) == {Cause.BASELINE: 1, cause: 1}
    assert [step.cause for step in steps] == [None, None, cause, None, None]
    assert math.isnan(steps[2].asked)
    assert len(adapter.applied) == 4
    assert [window.arrivals for window in recorded.windows] == [100, 100, 200, 100]


def test_a_server_that_is_not_there_at_first_is_steered_from_its_second_reading_on() -> None:
    script: list[Line] = [StaleTelemetry("no"), StaleTelemetry("no"), steady(7), steady(8), steady(9)]
    loop, adapter, _ = control(script)
    assert fallbacks(loop) == {Cause.UNREACHABLE: 1, Cause.BASELINE: 1}
    assert len(adapter.applied) == 2


def test_after_a_restart_the_controller_goes_on_from_what_is_applied_then() -> None:
    script: list[Line] = [*map(steady, range(4)), *(steady(k, alpha=0.2) for k in range(3))]
    loop, _, recorded = control(script)
    assert recorded.resumed == [0.2]
    assert loop.status.restarts == 1
    assert fallbacks(loop) == {Cause.BACKWARDS: 1}
    assert recorded.alphas == [0.5, 0.5, 0.5, 0.2, 0.2]


@pytest.mark.parametrize(
    ("target", "asked", "cause"),
    [
        (0.95, 0.8, Cause.OUT_OF_RANGE),
        (-3.0, 0.2, Cause.OUT_OF_RANGE),
        (1e300, 0.8, Cause.OUT_OF_RANGE),
        (math.nan, None, Cause.DECISION),
        (math.inf, None, Cause.DECISION),
        (ZeroDivisionError("a bug"), None, Cause.DECISION),
    ],
)
def test_what_the_controller_asks_for_is_kept_within_the_bounds(
    target: float | Exception, asked: float | None, cause: Cause
) -> None:
    loop, adapter, _ = control([steady(0), steady(1)], Steering(Recorded(target), 0.2, 0.8))
    assert fallbacks(loop) == {cause: 1}
    assert [alpha for alpha, _ in adapter.applied] == ([] if asked is None else [asked])


WILD = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.just(0.0), st.floats(0, 1e6))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([name for name in Counters.__dataclass_fields__ if name != "latency"]), WILD, max_size=4
        ),
        min_size=1,
        max_size=12,
    ),
    st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=4),
)
def test_alpha_stays_within_the_bounds_and_every_interval_is_accounted_for(
    changes: list[dict[str, float]], targets: list[float]
) -> None:
    """Whatever a server says, and whatever a controller asks for."""
    script: list[Line] = [steady(0), *(spoilt(steady(k), **change) for k, change in enumerate(changes, 1))]
    controller = Recorded(*[targets[k % len(targets)] for k in range(len(script))], 0.5)
    loop, adapter, _ = control(script, Steering(controller, 0.2, 0.8))
    assert all(0.2 <= alpha <= 0.8 for alpha, _ in adapter.applied)
    held = sum(n for cause, n in loop.status.fallbacks.items() if cause is not Cause.OUT_OF_RANGE)
    assert loop.status.intervals == len(changes) == loop.status.decisions + held
    assert all(np.isfinite(x).all() for x in controller.observations)


def test_what_the_server_cannot_give_is_shown_as_neutral() -> None:
    neutral = np.linspace(0.1, 0.9, SIZE, dtype=np.float32)
    script: list[Line] = [spoilt(steady(k), returning=None, rows=None, link_busy_s=None) for k in range(3)]
    recorded = Recorded(0.5)
    loop, _, _ = control(script, Steering(recorded, neutral=neutral))
    assert loop.status.masked == ("hot_user_ratio", "emb_hit_rate", "link_util", "link_demand")
    mask = np.isin(OBSERVATION_NAMES, loop.status.masked)
    for x in recorded.observations:
        assert np.array_equal(x[mask], neutral[mask])
        assert x[OBSERVATION_NAMES.index("kv_hit_rate")] == np.float32(0.6)
    loop, _, recorded = control(script)
    assert all((x[mask] == 0).all() for x in recorded.observations)


def test_targets_that_are_not_taken_are_counted() -> None:
    class Refusing(ScriptedAdapter):
        def apply(self, alpha: float, revision: int) -> float:
            self.applied.append((alpha, revision))
            if len(self.applied) == 1:
                raise StaleTelemetry("no")
            answers: list[Any] = [math.nan, 7.0, "half", np.array([0.5, 0.5]), None]
            return answers[len(self.applied) - 2] if len(self.applied) <= 6 else alpha

    adapter = Refusing([steady(k) for k in range(11)])
    clock = FakeClock(10.001)
    loop = ControlLoop(adapter, Recorded(0.6), 1.0, slo_ms=50.0, clock=clock)
    run(loop, clock)
    assert loop.status.unapplied == 6
    assert loop.status.decisions == 10
    assert loop.status.applied == 0.5  # as the counters have it


def test_targets_that_a_server_is_too_slow_for_are_counted() -> None:
    """The first is under way until the end, the second waits, each further one takes the place of the one before."""
    go, steps = threading.Event(), list[Step]()

    class Slow(ScriptedAdapter):
        def apply(self, alpha: float, revision: int) -> float:
            go.wait(60)
            return super().apply(alpha, revision)

    adapter = Slow([*(steady(k) for k in range(4)), StaleTelemetry("no counters"), steady(5)])
    clock = FakeClock(5.001)
    loop = ControlLoop(adapter, Recorded(0.6), 1.0, slo_ms=50.0, clock=clock, watch=steps.append)
    clock.busy = lambda: loop.status.decisions > 0 and not loop._applier._busy  # until the first is under way
    loop.run(threading.Event())
    go.set()
    assert (loop.status.decisions, loop.status.unapplied) == (4, 2)
    still = "the server is still at the target before"
    assert [step.unapplied for step in steps] == ["", "", still, "", still]
    assert [step.detail for step in steps] == ["", "", "", "no counters", ""]


def test_another_controller_takes_over_between_two_intervals() -> None:
    first, second = Recorded(0.6), Recorded(0.3)

    def swap() -> Counters:
        loop.replace(Steering(second, 0.1, 0.4))
        return steady(3)

    adapter = ScriptedAdapter([steady(0), steady(1), steady(2), swap, steady(4), steady(5)])
    clock = FakeClock(5.001)
    loop = ControlLoop(adapter, first, 1.0, slo_ms=50.0, clock=clock)
    run(loop, clock)
    assert len(first.observations) == 2
    assert len(second.observations) == 3
    assert (first.resets, second.resets) == (1, 1)
    assert (loop.status.intervals, loop.status.missed) == (5, 0)


class Counting(Recorded):
    """Says that it has fallen back so often."""

    def __init__(self, number: Any) -> None:
        super().__init__(0.5)
        self.number = number

    def fallbacks(self) -> dict[str, Any]:
        if isinstance(self.number, Exception):
            raise self.number
        return {"late": self.number, "stale": 0}


def test_what_controllers_count_is_there_once_while_one_takes_over_from_another() -> None:
    seen: list[dict[str, int]] = []

    class Past(Counter[str]):
        def update(self, *given_: Any, **more: Any) -> None:
            super().update(*given_, **more)
            if not self or threading.current_thread() is not threading.main_thread():
                return
            asking = threading.Thread(target=lambda: seen.append(loop.controller_fallbacks()))
            asking.start()  # as a scrape may, between the old one's counts and the new one
            asking.join(0.2)

    clock = FakeClock(2.001)
    loop = ControlLoop(ScriptedAdapter([steady(k) for k in range(3)]), Counting(5), 1.0, slo_ms=50.0, clock=clock)
    loop._past = Past()
    loop.replace(Counting(2))
    run(loop, clock)
    until = time.monotonic() + 5
    while not seen:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert seen == [{"late": 7, "stale": 0}]


@pytest.mark.parametrize("number", ["many", None, RuntimeError("a bug")])
def test_a_controller_that_cannot_count_ends_no_loop(number: Any) -> None:
    clock = FakeClock(3.001)
    loop = ControlLoop(ScriptedAdapter([steady(k) for k in range(4)]), Counting(number), 1.0, slo_ms=50.0, clock=clock)
    loop.replace(Counting(2))
    run(loop, clock)
    assert loop.status.decisions == 3
    assert loop.controller_fallbacks() == {"late": 2, "stale": 0}


def test_revisions_go_on_from_the_servers() -> None:
    ahead = 2.0**52
    _, adapter, _ = control([steady(k, revision=ahead) for k in range(4)])
    assert [revision for _, revision in adapter.applied] == [2**52 + 1, 2**52 + 2, 2**52 + 3]


# Bursts


def test_arrivals_between_two_readings_are_spread_over_ticks() -> None:
    loop, _, recorded = control([steady(k) for k in range(4)])
    assert len(recorded.ticks) == 300
    assert sum(arrivals for arrivals, _, _ in recorded.ticks) == 300
    assert {arrivals for arrivals, _, _ in recorded.ticks} == {1}
    ends = [now_ns for _, _, now_ns in recorded.ticks]
    assert set(np.diff(ends)) == {SECOND // 100}
    assert all(math.isnan(p99) for _, p99, _ in recorded.ticks)
    assert loop.status.bursts == 0


def finer(every_s: float, seconds: float, **changes: Any) -> list[Line]:
    """Return readings `every_s` apart; the server counts 100 requests a second."""
    return [
        steady(1, arrivals=100.0 * k * every_s, clock_s=k * every_s, **changes)
        for k in range(round(seconds / every_s) + 2)
    ]


def test_ticks_are_looked_at_as_finely_as_the_adapter_can_be_read() -> None:
    """Every 15 ms: 66 readings an interval, ticks of 10 ms carried over."""
    _, _, recorded = control(finer(1 / 66, 3.0), intervals=3, period_s=0.015)
    assert len(recorded.observations) == 3
    assert len(recorded.ticks) == pytest.approx(300, abs=2)
    assert sum(arrivals for arrivals, _, _ in recorded.ticks) == pytest.approx(300, abs=4)


def test_a_controller_that_fails_at_a_tick_decides_nothing_then() -> None:
    class Failing(Recorded):
        def tick(self, arrivals: int, p99_ms: float, now_ns: int) -> bool:
            super().tick(arrivals, p99_ms, now_ns)
            if len(self.ticks) == 150:
                raise RuntimeError("a bug")
            return False

    loop, adapter, _ = control([steady(k) for k in range(4)], Failing(0.6))
    assert fallbacks(loop) == {Cause.DECISION: 1}
    assert len(adapter.applied) == 2


def test_a_burst_is_decided_upon_at_once_and_the_next_interval_starts_there() -> None:
    recorded = Recorded(0.6)
    recorded.found_at = {130}
    clock = FakeClock(3.9)
    loop = ControlLoop(ScriptedAdapter(finer(0.1, 4.0), 0.1), recorded, 1.0, slo_ms=50.0, clock=clock)
    start = clock.time_ns
    times: list[float] = []
    loop._watch = lambda step: times.append(round((clock.time_ns - start) / SECOND, 6))
    run(loop, clock)
    assert times == [1.0, 1.3, 2.3, 3.3]
    assert loop.status.bursts == 1
    assert loop.status.missed == 0


def test_a_bundles_own_detector_finds_a_burst_and_its_score_is_in_the_observation() -> None:
    recovery = Recovery(StaticAlpha(0.8), RecoveryRule(0.7, 0.3), BurstSettings(least_s=2.0))
    arrived, script = 0.0, []
    for k in range(130):
        arrived += 10.0 if k < 100 else 60.0
        script.append(steady(1, arrivals=arrived, returning=0.0, clock_s=0.1 * k))
    loop, adapter, _ = control(script, recovery, intervals=12, period_s=0.1)
    assert loop.status.bursts == 1
    assert [alpha for alpha, _ in adapter.applied][:10] == [0.8] * 9 + [0.7]


def test_a_controller_without_a_detector_is_shown_the_score_of_one() -> None:
    arrived, script = 0.0, []
    for k in range(22):
        arrived += 100.0 if k < 18 else 500.0
        script.append(steady(1, arrivals=arrived, clock_s=float(k)))
    _, _, recorded = control(script)
    scores = [float(x[BURST]) for x in recorded.observations]
    assert max(scores[:17]) < 0.5
    assert scores[17] >= 0.5


# Time


class Delayed(ScriptedAdapter):
    """Takes its time for chosen reads."""

    def __init__(self, delays: dict[int, float], lines: int) -> None:
        super().__init__([], math.inf)
        self.delays, self.reads, self.lines = delays, 0, lines
        self.start = time.monotonic()

    def read(self) -> Counters:
        self.reads += 1
        seconds = time.monotonic() - self.start
        counters = steady(1, arrivals=100.0 * seconds, clock_s=None)
        time.sleep(self.delays.get(self.reads, 0.0))
        return counters


def run_for(loop: ControlLoop, seconds: float) -> None:
    with loop:
        time.sleep(seconds)


def test_an_answer_that_is_late_misses_no_interval_and_counts_for_the_next() -> None:
    """Intervals of .2 s. The fourth read takes .15 s: too late for its decision, in time for the next."""
    adapter = Delayed({4: 0.15}, 20)
    loop = ControlLoop(adapter, Recorded(0.5), 0.2, slo_ms=50.0)
    run_for(loop, 1.5)
    assert fallbacks(loop) == {Cause.LATE: 1}
    assert loop.status.missed == 0
    assert loop.status.decisions == loop.status.intervals - 1 >= 5


def test_a_server_that_hangs_misses_no_interval() -> None:
    adapter = Delayed({3: 30.0}, 20)
    loop = ControlLoop(adapter, Recorded(0.5), 0.1, slo_ms=50.0)
    begun = time.monotonic()
    run_for(loop, 1.0)
    assert time.monotonic() - begun < 6.0
    assert loop.status.missed == 0
    assert loop.status.decisions == 1
    assert loop.status.fallbacks[Cause.LATE] == loop.status.intervals - 1 >= 6


def test_a_target_that_hangs_misses_no_interval() -> None:
    class Hanging(Delayed):
        def apply(self, alpha: float, revision: int) -> float:
            time.sleep(30.0)
            return alpha

    loop = ControlLoop(Hanging({}, 20), Recorded(0.5), 0.1, slo_ms=50.0)
    run_for(loop, 0.8)
    assert loop.status.missed == 0
    assert loop.status.decisions == loop.status.intervals >= 5


def test_start_and_stop_and_what_ends_a_loop() -> None:
    def fail(step: Step) -> None:
        raise OSError("the disk is full")

    loop = ControlLoop(Delayed({}, 20), Recorded(0.5), 0.01, slo_ms=50.0, watch=fail)
    loop.start()
    assert loop.running
    with pytest.raises(RuntimeError, match="runs already"):
        loop.start()
    for _ in range(500):
        if not loop.running:
            break
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="the disk is full"):
        loop.stop()
    assert not [one for one in threading.enumerate() if one.name.startswith("helm-control")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"interval_s": 0.001}, "interval_s must be 0.005 to 10, not 0.001"),
        ({"interval_s": math.nan}, "interval_s must be"),
        ({"slo_ms": 0.0}, "slo_ms must be a number above 0"),
        ({"alpha0": 1.5}, "alpha0 must be within 0 and 1, not 1.5"),
    ],
)
def test_arguments_are_checked(options: dict[str, float], said: str) -> None:
    given_: dict[str, Any] = {"interval_s": 1.0, "slo_ms": 50.0, **options}
    with pytest.raises(UserError, match=said):
        ControlLoop(ScriptedAdapter([]), Recorded(0.5), **given_)


def test_bounds_are_checked() -> None:
    for low, high in ((0.5, 0.4), (-0.1, 0.5), (0.1, 1.1), (math.nan, 0.5)):
        with pytest.raises(UserError, match="must ascend within"):
            Steering(Recorded(0.5), low, high)
    with pytest.raises(UserError, match="neutral must lie within"):
        Steering(Recorded(0.5), neutral=np.full(SIZE, np.nan, np.float32))
