"""The live node as a server: its counters, its target, and both over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from envs.serving.live import LiveNode
from envs.serving.live_adapter import LiveAdapter
from helm_rl.runtime.adapters.http import HttpAdapter
from helm_rl.runtime.counters import Cause, StaleTelemetry, masked, unfit
from helm_rl.runtime.mapping import load_mapping
from helm_rl.runtime.server import HookServer
from tests.envs.test_live_env import arrivals, live

SECOND = 1_000_000_000


@pytest.fixture
def node() -> Iterator[LiveNode]:
    """A node that serves 100 requests a second for 20 s."""
    node = LiveNode(live(), arrivals(10.0, 20.0), compute_scale=0.1, table_rows=1 << 12)
    node.reset(0.5, 0)
    yield node
    node.close()


def test_counters_add_up_to_what_the_node_has_served(node: LiveNode) -> None:
    adapter = LiveAdapter(node)
    readings = []
    for _ in range(5):
        time.sleep(0.1)
        readings.append(adapter.read())
    last = readings[-1]
    assert all(unfit(one) is None for one in readings)
    assert [one.arrivals for one in readings] == sorted({one.arrivals for one in readings})
    assert last.clock_s is not None
    assert last.arrivals == pytest.approx(100 * last.clock_s, abs=2)
    assert last.latency is not None
    assert last.arrivals - 10 <= last.latency.requests.sum() <= last.arrivals
    assert last.history_tokens == pytest.approx(100 * last.latency.requests.sum(), abs=500)
    assert not masked(last).any()
    assert last.alpha == 0.5


def test_a_target_is_followed_unless_a_later_one_is_known(node: LiveNode) -> None:
    server = HookServer(LiveAdapter(node))
    outside = HttpAdapter(server.url, load_mapping("helm-rl"))
    assert 0.0 < outside.apply(0.7, 1_000) < 1.0
    end = time.monotonic() + 10
    while outside.read().alpha != pytest.approx(0.7, abs=0.01):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert outside.read().revision == 1_000
    with pytest.raises(StaleTelemetry):
        outside.apply(0.2, 999)
    assert node.target == 0.7
    server.close()


def test_the_node_keeps_within_its_own_bounds_and_what_it_was_asked_for_is_noted(node: LiveNode) -> None:
    adapter = LiveAdapter(node)
    adapter.apply(0.05, 10)
    adapter.apply(0.99, 11)
    assert adapter.asked == (0.05, 0.99)
    assert node.target == node.scenario.control.alpha_max


def test_a_node_that_is_gone_has_no_counters(node: LiveNode) -> None:
    adapter = LiveAdapter(node)
    node.close()
    with pytest.raises(StaleTelemetry) as caught:
        adapter.read()
    assert caught.value.cause is Cause.UNREACHABLE
