from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from envs.serving.replay import Replay
from eval.capacity import LEAST, MOST, capacity, compressed_trace, scaled_load
from eval.sweep import Work
from helm_rl.control.protocol import Controller
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace
from tests.eval.fakes import small_scenario


class Server:
    """Latency is that of M/M/1 with room for `limit` requests/s: 1 / (limit - rate) for all, shed beyond it."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.rates: list[float] = []

    def __call__(self, scenario: Scenario, trace: Trace, controller: Controller, *, alpha0: float, seed: int) -> Replay:
        seconds = (trace.end_ns - int(trace.arrival_ns[0])) / 1e9
        rate = len(trace) / seconds
        self.rates.append(rate)
        latency = 1000 / (self.limit - rate) if rate < self.limit else 100 * scenario.slo_ms
        nothing = np.empty(0, np.float32)
        measured = trace.arrival_ns >= trace.meta.measure_from_ns
        return Replay(
            latency_ms=np.full(len(trace), latency, np.float32),
            measured=measured,
            time_s=nothing.astype(np.float64),
            alpha=nothing,
            target=nothing,
            windows=[],
            decide_us=1.0,
            link_busy=0.0,
            compute_busy=0.0,
        )


def steady() -> Scenario:
    return small_scenario(load={"rate": 100, "users": 1000})


@pytest.fixture
def server() -> Iterator[tuple[Work, Server]]:
    server = Server(180.0)
    work = Work(1, replay=server)
    yield work, server
    work.close()


@pytest.mark.parametrize("limit", [31.0, 95.0, 180.0, 700.0])
def test_the_largest_load_within_the_slo_is_found_to_two_percent(limit: float) -> None:
    # 1 / (limit - rate) is 100 ms at a rate of limit - 10; the trace comes at about 100 requests/s.
    scenario = steady()
    trace = generate(scenario, seed=1)
    given = len(trace) / ((trace.end_ns - int(trace.arrival_ns[0])) / 1e9)
    server = Server(limit)
    work = Work(1, replay=server)
    found = capacity(lambda m: compressed_trace(scenario, trace, m), lambda m: StaticAlpha(0.5), 0.5, work)
    work.close()
    exact = (limit - 10.0) / given
    assert found.multiple <= exact < found.above <= 1.02 * found.multiple
    assert [p99 <= 100.0 for m, p99 in found.tried] == [m <= exact for m, _ in found.tried]
    assert found.tried[0][0] == 1.0
    assert len(found.tried) <= 14


def test_a_load_that_never_and_one_that_always_keeps_the_slo() -> None:
    scenario = steady()
    trace = generate(scenario, seed=1)
    for limit, multiple, above in ((0.5, 0.0, LEAST), (1e9, MOST, np.inf)):
        work = Work(1, replay=Server(limit))
        found = capacity(lambda m: compressed_trace(scenario, trace, m), lambda m: StaticAlpha(0.5), 0.5, work)
        work.close()
        assert (found.multiple, found.above) == (multiple, above)


def test_the_controller_is_made_for_each_load(server: tuple[Work, Server]) -> None:
    scenario = steady()
    trace = generate(scenario, seed=1)
    asked = []

    def make(multiple: float) -> StaticAlpha:
        asked.append(multiple)
        return StaticAlpha(0.5)

    found = capacity(lambda m: compressed_trace(scenario, trace, m), make, 0.5, server[0])
    assert asked == [multiple for multiple, _ in found.tried]


def test_every_rate_of_a_scaled_load_is_multiplied() -> None:
    base = small_scenario()
    load = base.load.model_copy(update={"rate_end": 40.0})
    heavier, trace = scaled_load(base.model_copy(update={"load": load}), 7, 1.5)
    assert (heavier.load.rate, heavier.load.rate_end) == (150.0, 60.0)
    assert [(phase.rate, phase.rate_end) for phase in heavier.load.phase] == [(75.0, None)]
    assert heavier.load.phase[0].start_s == 40.0
    assert len(trace) == pytest.approx(1.5 * len(generate(base.model_copy(update={"load": load}), seed=7)), rel=0.05)


def test_a_compressed_trace_keeps_requests_order_and_segments() -> None:
    scenario = small_scenario()
    trace = generate(scenario, seed=3)
    _, faster = compressed_trace(scenario, trace, 1.3)
    faster.validate()
    np.testing.assert_allclose(faster.arrival_ns, trace.arrival_ns / 1.3, atol=1.0)
    np.testing.assert_array_equal(faster.user, trace.user)
    before, after = trace.segments(), faster.segments()
    assert [segment.label for segment in after] == [segment.label for segment in before]
    for one, other in zip(before, after, strict=True):
        requests = np.searchsorted(trace.arrival_ns, [one.start_ns, one.end_ns])
        np.testing.assert_array_equal(np.searchsorted(faster.arrival_ns, [other.start_ns, other.end_ns]), requests)
    _, same = compressed_trace(scenario, trace, 1.0)
    np.testing.assert_array_equal(same.arrival_ns, trace.arrival_ns)
    with pytest.raises(UserError, match="out of range"):
        compressed_trace(scenario, trace, 1e-12)
