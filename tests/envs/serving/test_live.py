"""The live node with an HSTU: its scores, its link, its clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from envs.serving.live import LiveNode
from envs.serving.live_compute import Network, Taken
from helm_rl.errors import UserError
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import Scenario
from helm_rl.workloads.trace import Trace
from tests.envs.worlds import scenario, trace

Make = Callable[..., LiveNode]


def small(**changes: Any) -> Scenario:
    """128 pages of 32 tokens or 256 rows each; 2 layers of 2 heads."""
    given = {
        "model__profile": "hstu-3",
        "model__layers": 2,
        "model__d_model": 32,
        "model__heads": 2,
        "model__kv_heads": 2,
        "model__head_dim": 8,
        "model__value_bytes": 4,
        "model__row_bytes": 32,
        "model__features_per_token": 3,
        "model__candidates": 8,
        "hardware__profile": "cpu",
        "hardware__pool_gib": 1 / 1024,
        "hardware__page_kib": 8,
        "hardware__link_gb_s": 1.0,
        "control__migrate_pages_per_s": 4000,
    }
    return scenario(**(given | changes))


def returning(n: int, users: int, every_ms: float = 4.0, grow: int = 20, **columns: Any) -> Trace:
    """Users in turn, each with `grow` more tokens every time."""
    history = [grow * (k // users + 1) for k in range(n)]
    return trace([every_ms * (k + 1) for k in range(n)], [k % users for k in range(n)], history, grow, **columns)


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[LiveNode] = []

    def make_one(scenario: Scenario | None = None, load: Trace | None = None, **options: Any) -> LiveNode:
        defaults: dict[str, Any] = {"table_rows": 1 << 12, "verify": True}
        node = LiveNode(scenario or small(), load or returning(60, 6), **(defaults | options))
        made.append(node)
        return node

    yield make_one
    for node in made:
        node.close()


def until(truth: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not truth():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def serve_through_resizes(node: LiveNode) -> None:
    """Serve 300 requests with 8 candidates each while pages go to and fro; every score is right, none is lost."""
    node.reset(0.5, 0)
    for alpha in (0.9, 0.1, 0.9, 0.2, 0.8, 0.5):
        node.set_target(alpha)
        time.sleep(0.2)
    until(lambda: node.totals.requests == 300)
    node._shut_down()
    totals = node.totals
    assert totals.scores_verified == 300 * 8
    assert totals.wrong_scores == totals.wrong_bytes == totals.shed == 0
    assert totals.pages_moved > 200


def test_every_score_is_that_of_the_whole_request_from_the_tables(make: Make) -> None:
    """Through resizes back and forth that leave too little room for everybody; no request is lost."""
    node = make(small(hardware__max_batch=4), returning(300, 10, grow=8))
    serve_through_resizes(node)
    assert 0 < node.times.prefix.sum() < (node.trace.history_tokens - 8).sum()
    assert np.isfinite(node.latency_ms).all()


@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_damaged_page_gives_wrong_scores(make: Make, side: str) -> None:
    node = make(small(), trace([5.0, 400.0], [3, 3], [40, 41], [40, 1]))
    node.reset(0.5, 0)
    until(lambda: node.totals.requests == 1)
    with node.pool.lock:
        page = int(node._kv.pages(3)[0])
        keys, values = node.compute._pages[page][0]  # type: ignore[attr-defined]
        (keys if side == "keys" else values)[0, 3, 5] += 40.0
    until(lambda: node.totals.requests == 2)
    node._shut_down()
    assert node.totals.scores_verified == 16
    assert 1 <= node.totals.wrong_scores <= 8


def test_a_score_that_is_no_number_is_wrong(make: Make) -> None:
    node = make(load=trace([5.0], [3], [40], [40]))
    run = node.compute.run

    def spoil(batch: Sequence[Taken], stop: threading.Event) -> int:
        took = run(batch, stop)
        batch[0].scores = batch[0].scores + float("nan")
        return took

    node.compute.run = spoil  # type: ignore[method-assign]
    node.reset(0.5, 0)
    until(lambda: node.totals.scores_verified == 8)
    assert node.totals.wrong_scores == 8


def test_a_history_without_room_is_computed_all_the_same(make: Make) -> None:
    """Two histories of 100 of 128 pages each cannot both be in use."""
    node = make(small(hardware__max_batch=2), trace([5.0, 5.0], [1, 2], [3200, 3200], [3200, 3200]))
    node.reset(0.1, 0)
    until(lambda: node.totals.requests == 2)
    node._shut_down()
    assert node.totals.refused == 1
    assert node.totals.scores_verified == 16
    assert node.totals.wrong_scores == 0


def test_the_link_takes_at_least_the_time_of_its_bandwidth_and_one_request_at_a_time(make: Make) -> None:
    """Nothing is cached (content items), so a request fetches all its distinct rows: 1,524 of them at 1 MB/s."""
    load = trace([1.0] * 5, range(5), 500, 500, items=range(2500), content="items", catalogue=4000)
    slow = small(hardware__link_gb_s=0.001, hardware__max_batch=1)
    node = make(slow, load, verify=False)
    node.reset(0.1, 0)
    until(lambda: node.totals.requests == 5)
    link_ms, compute_ms = node.times.link_ns * 1e-6, node.times.compute_ns * 1e-6
    assert 40 < link_ms.min() <= link_ms.max() < 49
    expected = link_ms.cumsum()
    assert (node.latency_ms >= expected).all()  # and compute beside it
    assert (node.latency_ms - expected < 30 + 3 * compute_ms).all()
    window = node.run(node.clock_ns())
    assert window.link_busy_ns == pytest.approx(node.times.link_ns.sum(), abs=5)
    assert window.compute_busy_ns == pytest.approx(node.times.compute_ns.sum(), abs=5)


def test_a_pause_stops_the_clock_and_loses_nothing(make: Make) -> None:
    node = make(load=returning(100, 5, every_ms=10.0, grow=3))
    node.reset(0.5, 0)
    node.run(300_000_000)
    node.pause()
    node.pause()
    stopped, served = node.clock_ns(), node.totals.requests
    time.sleep(0.4)
    assert node.clock_ns() == stopped
    assert node.totals.requests == served < 100
    node.resume()
    node.resume()
    until(lambda: node.totals.requests == 100)
    assert node.clock_ns() < stopped + 60e9
    # Who waited through the pause did not see it: no latency is near .4 s.
    around = np.abs(node.trace.arrival_ns - stopped) < 50_000_000
    assert around.sum() >= 5
    assert node.latency_ms[around].max() < 350
    assert node.totals.wrong_scores == 0


def test_a_clock_that_goes_on_while_it_is_read_has_a_time() -> None:
    """Another thread resumes the node between two looks at whether it stands."""

    class Resumed(LiveNode):
        looks = iter((7, None))
        _paused_ns = property(lambda self: next(self.looks))  # type: ignore[assignment]

    assert Resumed.__new__(Resumed).clock_ns() == 7


def test_no_page_moves_while_the_clock_stands(make: Make) -> None:
    node = make(small(control__migrate_pages_per_s=200, control__tick_s=0.01))
    node.reset(0.2, 0)
    node.set_target(0.8)
    node.pause()
    time.sleep(0.02)  # a tick that was under way
    alpha = node.alpha
    time.sleep(0.1)
    assert node.alpha == alpha < 0.5
    node.resume()
    until(lambda: node.alpha > alpha)


def test_batches_are_numbered_and_hold_what_was_ready(make: Make) -> None:
    node = make(small(hardware__max_batch=4), returning(12, 3, every_ms=0.0, grow=30))
    node.reset(0.5, 0)
    until(lambda: node.totals.requests == 12)
    sizes = np.bincount(node.times.batch)
    assert sizes.sum() == 12
    assert sizes.max() <= 4
    for batch in range(sizes.size):
        assert np.unique(node.times.compute_ns[node.times.batch == batch]).size == 1


def test_rows_that_are_no_whole_number_of_values_are_refused(make: Make) -> None:
    with pytest.raises(UserError, match=r"model\.row_bytes = 30 must be a multiple of model\.value_bytes = 4"):
        make(small(model__row_bytes=30))


def test_bf16_is_what_two_bytes_are() -> None:
    import torch

    network = Network(resolve_model(small(model__value_bytes=2).model), "cpu", 64)
    assert network.hstu.position.dtype == torch.bfloat16
    assert network.hstu.shape.row_values == 16
