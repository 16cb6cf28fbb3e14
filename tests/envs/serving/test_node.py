"""One node: latencies worked out by hand, alpha under its budget, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cache_engine.backends.cpu import embedding, kv_host
from envs.serving import loop
from envs.serving.node import CURVE_STEPS, NodeSim
from helm_rl.errors import UserError
from helm_rl.metrics import SHED_FACTOR, WindowStats, p99_ms
from helm_rl.profiles.hardware import HARDWARE
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate, zipf_codes
from helm_rl.workloads.trace import Trace
from tests.envs.worlds import QUICK, scenario, trace

SECOND = 1_000_000_000
PAGES = 256
A100 = HARDWARE["a100-80g"]
# Decoder-0.2b: what a token, and a pair of tokens in attention, take.
TOKEN_MS = A100.prefill_ns(2 * 16 * (1024 * (2 * 1024 + 2 * 256) + 3 * 1024 * 2816), 0.0) * 1e-6
PAIR_MS = A100.prefill_ns(0.0, 4 * 16 * 16 * 64) * 1e-6


@pytest.fixture(scope="module")
def load() -> tuple[Scenario, Trace]:
    small = scenario()
    return small, generate(small)


def serve(node: NodeSim, step_ns: int = SECOND // 2) -> list[WindowStats]:
    windows = []
    while node.now_ns < node.end_ns:
        windows.append(node.run(node.now_ns + step_ns))
    node.drain()
    return windows


def total(windows: list[WindowStats], field: str) -> float:
    return sum(getattr(window, field) for window in windows)


# Latency


def test_latencies_of_a_user_by_hand() -> None:
    """Decoder-0.2b on an A100, whose link is too fast to matter."""
    small = scenario(hardware__link_gb_s=1e4, model__candidates=10)
    made = trace([0.0, 1000.0, 2000.0], user=[0, 0, 0], history=[1000, 1010, 1010], new=[1000, 10, 1])
    node = NodeSim(small, made, 0.5)
    windows = serve(node, SECOND)

    fixed_ms = A100.batch_ms + A100.request_ms

    def work_ms(found: int, history: int) -> float:
        fresh = history - found
        return (fresh + 10) * TOKEN_MS + (fresh * (found + fresh / 2) + 10 * history) * PAIR_MS

    expected = [fixed_ms + work_ms(0, 1000), fixed_ms + work_ms(1000, 1010), fixed_ms + work_ms(1009, 1010)]
    assert node.latency_ms == pytest.approx(expected, rel=1e-4)
    # The newest events were never computed: they are asked for, and cannot be found.
    assert [window.history_tokens for window in windows] == [1000, 1010, 1010]
    assert [window.history_tokens_hit for window in windows] == [0, 1000, 1009]
    assert [window.rows for window in windows] == [4 * (1000 + 10), 4 * (10 + 10), 4 * (1 + 10)]
    assert [window.returning for window in windows] == [0, 1, 1]
    busy_ms = [window.compute_busy_ns * 1e-6 for window in windows]
    assert busy_ms == pytest.approx([value - 2.0 for value in expected], rel=1e-4)


def test_who_comes_at_once_is_served_at_once() -> None:
    small = scenario(hardware__link_gb_s=1e4, model__candidates=0)
    made = trace([0.0, 50.0, 50.0, 50.0], history=1)
    node = NodeSim(small, made, 0.5)
    node.drain()
    alone, *together = node.latency_ms.tolist()
    assert together == [together[0]] * 3
    # One batch of three tokens, not three of one: the fixed cost of a batch is paid once.
    assert together[0] == pytest.approx(alone + 2 * TOKEN_MS, abs=1e-4)


def test_missing_rows_cross_the_link() -> None:
    """With no hits at all, the link carries every row: 512 bytes at .1 GB/s, 5.12 us each."""
    # The smoothed miss rate starts at 0 and takes some 20,000 lookups: these requests make 10,000 each.
    items = list(range(200_000))
    n = 200
    made = trace((np.arange(n) * 500.0).tolist(), history=1000, new=1000, items=items, content="items")
    node = NodeSim(scenario(model__candidates=0, control__alpha_max=0.12, model__features_per_token=20), made, 0.1)
    assert node.rate == 0.5
    windows = serve(node)
    assert windows[0].history_tokens_hit == 0
    last = windows[-1]
    assert last.arrivals == 1
    assert last.rows_hit / last.rows < 0.001
    assert last.link_busy_ns == pytest.approx(1000 * 20 * 5120, rel=1e-3)


def test_copies_of_a_row_in_one_request_are_fetched_once() -> None:
    """A batch counts every copy of a missed row as a miss, but the link carries it once."""
    # Each request: 100 tokens of one item of its own; all but the first copy come for free.
    n = 400
    items = np.repeat(np.arange(n), 100).tolist()
    made = trace((np.arange(n) * 100.0).tolist(), history=100, new=100, items=items, content="items")
    node = NodeSim(scenario(model__candidates=0, hardware__pool_gib=0.125), made, 0.5)
    assert node.rate == 1.0
    windows = serve(node, 100_000_000)
    last = windows[-1]
    assert 1 - last.rows_hit / last.rows == pytest.approx(1.0, abs=0.2)
    assert last.link_busy_ns == pytest.approx(0.01 * (last.rows - last.rows_hit) * 5120, rel=1e-3)


def test_a_second_of_stall_shows_in_the_p99_of_the_node() -> None:
    """Through the whole node: one history whose prefill takes a second, at 100 requests/s for 10 s."""
    small = scenario(hardware__link_gb_s=1e4, model__candidates=0, hardware__pool_gib=4.0, load__history_max=1 << 20)
    history = np.full(1000, 10)
    history[500] = 76_000
    stall_ms = 76_000 * TOKEN_MS + 0.5 * 76_000**2 * PAIR_MS
    made = trace((np.arange(1000) * 10.0).tolist(), history=history, new=history)
    node = NodeSim(small, made, 0.5)
    node.drain()
    assert stall_ms == pytest.approx(1_000, rel=0.05)
    assert node.latency_ms[500] == pytest.approx(stall_ms, rel=0.01)
    assert p99_ms(node.latency_ms) == pytest.approx(stall_ms - 100, rel=0.01)  # rank 990: the tenth to come meanwhile
    assert np.median(node.latency_ms) < 3


# Alpha


def test_alpha_follows_its_target_within_the_budget() -> None:
    """200 pages a second, looked at every 10 ms: from .5 to .9 of 256 pages is 102 of them, half a second."""
    made = trace([0.0, 5000.0])
    node = NodeSim(scenario(), made, 0.5)
    assert node.alpha == 0.5
    node.run(SECOND)
    node.set_target(0.9)
    assert node.alpha == 0.5  # nothing moves by asking
    alphas, moved, backlog = [], [], []
    for k in range(6):
        window = node.run(SECOND + (k + 1) * SECOND // 10)
        alphas.append(window.alpha * PAGES)
        moved.append(window.moved_pages)
        backlog.append(window.backlog_pages)
        assert window.target == 0.9
    assert moved == [20, 20, 20, 20, 20, 2]
    assert alphas == [148, 168, 188, 208, 228, 230]
    assert backlog == [82, 62, 42, 22, 2, 0]
    node.set_target(0.1)
    window = node.run(2 * SECOND + SECOND // 10)
    assert window.moved_pages == 100
    node.set_target(window.alpha)  # turned round midway
    assert node.run(3 * SECOND).moved_pages == 0


def test_a_budget_below_a_page_a_tick_adds_up() -> None:
    node = NodeSim(scenario(control__migrate_pages_per_s=30, control__tick_s=0.01), trace([0.0, 9000.0]), 0.5)
    node.set_target(0.9)
    moved = [node.run((k + 1) * SECOND).moved_pages for k in range(4)]
    assert sum(moved) == 102
    assert moved[:3] == pytest.approx([30, 30, 30], abs=1)


def test_migration_costs_hits() -> None:
    """A page that leaves takes its blocks along: histories found at .5 are gone after a visit to .9."""
    n = 600
    made = trace((np.arange(n) * 20.0).tolist(), user=(np.arange(n) % 100).tolist(), history=1024, new=0)
    node = NodeSim(scenario(model__candidates=0, control__migrate_pages_per_s=1e4), made, 0.1)
    before = [node.run((k + 1) * 2 * SECOND) for k in range(3)][-1]
    assert before.history_tokens_hit / before.history_tokens < 0.95  # 100 users need 800 pages
    node.reset(0.1)
    some = NodeSim(
        scenario(model__candidates=0, control__migrate_pages_per_s=1e4),
        trace((np.arange(n) * 20.0).tolist(), user=(np.arange(n) % 20).tolist(), history=1024, new=0),
        0.1,
    )
    some.run(4 * SECOND)
    assert some.run(5 * SECOND).history_tokens_hit == 50 * 1024  # 20 users fit
    some.set_target(0.9)
    some.run(6 * SECOND)
    some.set_target(0.1)
    some.run(6 * SECOND + SECOND // 10)
    after = some.run(8 * SECOND)
    assert 0 < after.history_tokens_hit < after.history_tokens


@pytest.mark.parametrize(("asked", "got"), [(-3.0, 0.1), (0.05, 0.1), (0.33, 0.33), (0.95, 0.9), (7.0, 0.9)])
def test_targets_are_clipped_to_the_bounds(asked: float, got: float) -> None:
    node = NodeSim(scenario(), trace([0.0, 100.0]), 0.5)
    node.set_target(asked)
    assert node.target == got
    node.reset(asked)
    assert node.target == got
    assert node.alpha == pytest.approx(got, abs=0.5 / PAGES)


@pytest.mark.parametrize("alpha", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_refused_and_changes_nothing(alpha: float) -> None:
    node = NodeSim(scenario(), trace([0.0, 100.0]), 0.5)
    node.set_target(0.4)
    with pytest.raises(ValueError, match="alpha must be a number"):
        node.set_target(alpha)
    assert node.target == 0.4
    assert node.run(10 * SECOND).alpha == pytest.approx(0.4, abs=0.5 / PAGES)
    with pytest.raises(ValueError, match="alpha must be a number"):
        node.reset(alpha)


def test_bounds_of_0_and_1_leave_each_cache_a_page() -> None:
    small = scenario(control__alpha_min=0.0, control__alpha_max=1.0, control__migrate_pages_per_s=1e6)
    node = NodeSim(small, trace((np.arange(50) * 100.0).tolist()), 0.0)
    assert node.alpha == 1 / PAGES
    node.set_target(1.0)
    assert node.run(SECOND).alpha == 255 / PAGES
    node.drain()
    assert np.isfinite(node.latency_ms).all()


# What depends on what


def test_same_seed_same_bits(load: tuple[Scenario, Trace]) -> None:
    nodes = [NodeSim(*load, 0.5) for _ in range(2)]
    first, second = (serve(node) for node in nodes)
    assert first == second
    assert np.array_equal(nodes[0].latency_ms, nodes[1].latency_ms)
    nodes[0].reset(0.5)
    assert serve(nodes[0]) == first  # and nothing is left of the first run


def test_time_cut_in_pieces_changes_no_latency(load: tuple[Scenario, Trace]) -> None:
    small, made = load
    targets = {4 * SECOND: 0.2, 9 * SECOND: 0.8, 14 * SECOND: 0.5}

    def latencies(times: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float32], list[WindowStats]]:
        node = NodeSim(small, made, 0.5)
        windows = []
        for time_ns in np.unique(np.concatenate([times, list(targets)])):
            windows.append(node.run(int(time_ns)))
            if int(time_ns) in targets:
                node.set_target(targets[int(time_ns)])
        node.drain()
        return node.latency_ms, windows

    once, coarse = latencies(np.array([made.end_ns]))
    ticks = np.arange(-3 * SECOND, made.end_ns, SECOND // 100)
    rng = np.random.default_rng(0)
    for times in (ticks, rng.integers(-3 * SECOND, made.end_ns, 2_000), made.arrival_ns[made.arrival_ns > 0]):
        often, fine = latencies(np.append(times, made.end_ns))
        assert np.array_equal(once, often)
        for field in ("arrivals", "returning", "history_tokens", "history_tokens_hit", "rows", "moved_pages"):
            assert total(coarse, field) == pytest.approx(total(fine, field), rel=1e-9)
        # What was under way when the last window closed had been begun before: busy time is counted once.
        assert total(coarse, "link_busy_ns") == total(fine, "link_busy_ns")
        assert total(coarse, "compute_busy_ns") == total(fine, "compute_busy_ns")
    assert np.isfinite(once).all()


def test_each_cache_hits_more_when_it_is_larger(load: tuple[Scenario, Trace]) -> None:
    small, made = load
    kv, emb = [], []
    for alpha in (0.1, 0.3, 0.5, 0.7, 0.9):
        windows = serve(NodeSim(small, made, alpha))
        kv.append(total(windows, "history_tokens_hit") / total(windows, "history_tokens"))
        emb.append(total(windows, "rows_hit") / total(windows, "rows"))
    assert all(a > b for a, b in pairwise(kv))
    assert all(a < b for a, b in pairwise(emb))
    assert kv[0] - kv[-1] > 0.1
    assert emb[-1] - emb[0] > 0.05


def test_the_sample_of_rows_stands_for_all(load: tuple[Scenario, Trace]) -> None:
    small, made = load
    rates, misses = [], []
    for slots in (1 << 20, 1 << 18, 1 << 16):
        node = NodeSim(small, made, 0.5, max_sampled_slots=slots)
        node.run(0)
        before = node.state.emb.counters.copy()
        node.drain()
        counted = node.state.emb.counters - before
        rates.append(node.rate)
        misses.append(counted[embedding.MISSES] / counted[embedding.REQUESTED])
    assert rates == [1.0, 0.25, 0.0625]
    assert misses[0] > 0.1
    assert misses == pytest.approx([misses[0]] * 3, abs=0.006)


def test_the_sample_of_items_stands_for_all() -> None:
    """Half of all items are in the sample at 1/16, one row each. Which popular ones these are is chance: plain rates
    err by .036 here. SIEVE takes long to settle, and a small sample is averaged over many requests.
    """
    n = 9000
    codes = zipf_codes(np.random.default_rng(0), n * 40, 0.8, 50_000)
    items = np.random.default_rng(1).permutation(50_000)[codes].tolist()
    made = trace((np.arange(n) * 10.0).tolist(), history=40, new=40, items=items, content="items")
    small = scenario(model__features_per_token=8, model__candidates=0, **QUICK)
    hits = []
    for slots in (1 << 17, 1 << 13):
        node = NodeSim(small, made, 0.3, max_sampled_slots=slots)
        windows = serve(node)[-20:]
        hits.append(total(windows, "rows_hit") / total(windows, "rows"))
    assert node.rate == 1 / 16
    assert hits[1] == pytest.approx(hits[0], abs=0.01)


def test_windows_add_up(load: tuple[Scenario, Trace]) -> None:
    small, made = load
    node = NodeSim(small, made, 0.5)
    windows = serve(node)
    assert total(windows, "arrivals") == len(made)
    assert all(a.end_ns == b.start_ns for a, b in pairwise(windows))
    assert windows[0].start_ns == made.arrival_ns[0]
    last = node.latency_ms.astype(np.float64)
    done = made.arrival_ns + last * 1e6 <= windows[-1].end_ns
    # float32 latencies are good to 1 in 10^7, and a request may end at the very edge.
    assert total(windows, "completed") == pytest.approx(np.count_nonzero(done), abs=1)
    assert total(windows, "latency_ms_sum") == pytest.approx(last[done].sum(), rel=1e-3)
    assert total(windows, "log_latency_sum") == pytest.approx(np.log(last[done] / small.slo_ms).sum(), rel=1e-3)
    assert total(windows, "slow") == np.count_nonzero(last[done] > small.slo_ms)
    again = np.zeros(len(made), bool)
    seen: dict[int, int] = {}
    for i, (user, at) in enumerate(zip(made.user.tolist(), made.arrival_ns.tolist(), strict=True)):
        again[i] = user in seen and at - seen[user] <= 60 * SECOND
        seen[user] = at
    assert total(windows, "returning") == np.count_nonzero(again)


def test_pages_for_embeddings_gain_less_the_more_there_are(load: tuple[Scenario, Trace]) -> None:
    small = scenario(hardware__pool_gib=1 / 16, hardware__page_kib=256)
    margins = [serve(NodeSim(small, load[1], alpha))[-1].emb_margin_ms for alpha in (0.15, 0.5, 0.85)]
    assert margins[0] > 2 * margins[1] > 4 * margins[2] > 0


def test_pages_for_histories_gain_where_the_next_one_would_just_fit() -> None:
    """30 users in turn, 4 pages each: what misses would be found with 120 pages, .47 of the pool, and not below."""
    n = 900
    made = trace((np.arange(n) * 10.0).tolist(), user=(np.arange(n) % 30).tolist(), history=512, new=0)
    small = scenario(hardware__link_gb_s=1e4, model__candidates=0)
    margins = [serve(NodeSim(small, made, alpha))[-1].kv_margin_ms for alpha in (0.2, 0.53, 0.8)]
    assert margins[0] == margins[2] == 0
    # 4 pages of 128 tokens a request, spread over the .04 of the pool to either side.
    assert margins[1] == pytest.approx(0.01 * 4 * 128 * TOKEN_MS / 0.08, rel=0.1)


def test_curves_say_what_any_share_of_the_pool_would_save() -> None:
    """The same users: nothing with less than .47 of the pool, all of their prefill with more."""
    n = 900
    made = trace((np.arange(n) * 10.0).tolist(), user=(np.arange(n) % 30).tolist(), history=512, new=0)
    small = scenario(hardware__link_gb_s=1e4, model__candidates=0)
    window = serve(NodeSim(small, made, 0.5))[-1]
    saved = np.array(window.kv_saved_ms)
    share = np.linspace(0, 1, saved.size)
    assert saved.size == len(window.emb_saved_ms) == CURVE_STEPS + 1
    assert saved[share < 0.45].max() == 0.0
    assert saved[share > 0.49] == pytest.approx(4 * 128 * TOKEN_MS, rel=0.1)
    assert np.diff(window.emb_saved_ms).min() >= 0.0


def test_it_starts_where_it_is_told(load: tuple[Scenario, Trace]) -> None:
    small, made = load
    node = NodeSim(small, made, 0.5, start_ns=10 * SECOND)
    node.drain()
    early = made.arrival_ns < 10 * SECOND
    assert np.isnan(node.latency_ms[early]).all()
    assert np.isfinite(node.latency_ms[~early]).all()
    with pytest.raises(ValueError, match="lies before the node's clock"):
        node.run(10 * SECOND)


@pytest.mark.parametrize("content", ["items", "blocks"])
def test_other_content_is_served(content: str) -> None:
    """As of KuaiRand and of Mooncake: users come back, and what they share is found in the caches."""
    n = 300
    rng = np.random.default_rng(3)
    user = rng.integers(0, 30, n)
    seen = np.zeros(30, int)
    history = np.zeros(n, int)
    for i, u in enumerate(user):
        seen[u] += 8
        history[i] = seen[u]
    if content == "items":
        items, meta = rng.integers(0, 2_000, 8 * n).tolist(), {}
    else:
        items = [int(u) * 100 + k for u, tokens in zip(user, history, strict=True) for k in range(-(-tokens // 16))]
        meta = {"block_tokens": 16}
    made = trace(
        (np.arange(n) * 20.0).tolist(), user.tolist(), history.tolist(), 8, items=items, content=content, **meta
    )
    node = NodeSim(scenario(), made, 0.5)
    windows = serve(node)
    assert np.isfinite(node.latency_ms).all()
    # All fits: nothing but new events is ever missing from the KV cache.
    assert total(windows, "history_tokens_hit") == (history - 8).sum()
    assert 0 < total(windows, "rows_hit") < total(windows, "rows")


def test_columns_of_any_layout_are_served(load: tuple[Scenario, Trace]) -> None:
    made = trace([0.0, 10.0, 20.0], history=[100, 200, 300])
    frozen = trace([0.0, 10.0, 20.0], history=[100, 200, 300])
    for column in (frozen.arrival_ns, frozen.user, frozen.tenant, frozen.history_tokens, frozen.item_values):
        column.setflags(write=False)
    latencies = []
    for each in (made, frozen):
        node = NodeSim(scenario(tenant=[{"name": "only"}]), each, 0.5)
        node.drain()
        latencies.append(node.latency_ms)
    assert np.array_equal(*latencies)


# Overload


def test_overload_sheds_and_ends() -> None:
    """Far more load than link and accelerator can serve, on a link slow enough for years."""
    n = 2_000
    made = trace((np.arange(n) * 1.0).tolist(), history=1000, new=1000)
    for link_gb_s in (0.01, 1e-12):
        small = scenario(hardware__link_gb_s=link_gb_s, hardware__queue_bound=16)
        node = NodeSim(small, made, 0.1)
        begun = time.perf_counter()
        windows = serve(node)
        assert time.perf_counter() - begun < 20.0
        shed = int(total(windows, "shed"))
        assert shed > n / 2
        assert np.count_nonzero(node.latency_ms == SHED_FACTOR * small.slo_ms) == shed
        assert not np.isnan(node.latency_ms).any()
        assert max(window.queue for window in windows) == 16
        assert all(math.isfinite(window.log_latency_sum) for window in windows)


def test_a_gap_of_days_is_crossed_at_once() -> None:
    gap_ms = 5 * 86_400_000.0  # 864,000 intervals: nearly as long as a trace may be
    made = trace([0.0, gap_ms], history=10)
    node = NodeSim(scenario(control__tick_s=0.0005), made, 0.5)
    begun = time.perf_counter()
    node.drain()
    assert time.perf_counter() - begun < 5.0
    assert np.isfinite(node.latency_ms).all()


# Refused


def empty() -> Trace:
    return trace([], history=[], new=[])


def unsound() -> Trace:
    made = trace([0.0, 1.0])
    made.user[1] = 99
    return made


@pytest.mark.parametrize(
    ("changes", "made", "message"),
    [
        ({}, empty, "no requests"),
        ({}, unsound, r"user\[1\] = 99 is outside"),
        ({"hardware__page_kib": 8}, None, "page_kib = 8 is too small"),
        ({"model__row_bytes": 1 << 20, "hardware__page_kib": 512}, None, "page_kib = 512 is too small"),
        ({"model__layers": 1024, "model__kv_heads": 16}, None, "page_kib = 2048 is too small"),
        ({"hardware__pool_gib": 0.03}, None, "holds 15 pages"),
        ({"hardware__pool_gib": 10_000, "hardware__page_kib": 64}, None, "there must be 16 to"),
        ({"hardware__nodes": 4}, None, "hardware.nodes = 4"),
        ({"event": [{"at_s": 1.0, "node": 0, "action": "lose"}]}, None, "one node is simulated here, which is always"),
        ({"hardware__profile": "tpu"}, None, "hardware.profile = 'tpu' is unknown; known: a100-80g"),
        ({"model__profile": "gpt"}, None, "model.profile = 'gpt' is unknown; known: decoder-0.2b"),
        ({"model__heads": 16, "model__kv_heads": 3}, None, "must be a multiple of model.kv_heads"),
        ({}, lambda: trace([0.0, 5e9]), "lasts 5,000,000 s, more than 1,000,000 intervals"),
        ({}, lambda: trace([0.0], history=50_000_000), "history of 50000000 tokens"),
        (
            {"tenant": [{"name": "a"}, {"name": "b"}]},
            lambda: trace([0.0, 1.0], tenant=[0, 2]),
            r"has a tenant 2, and scenario small has only 2 \(counted from 0\); add \[\[tenant\]\] tables",
        ),
        ({"model__candidates": 1_000_000, "model__features_per_token": 100}, None, "model.candidates = 1000000"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(
    changes: dict[str, Any], made: Callable[[], Trace] | None, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        NodeSim(scenario(**changes), trace([0.0, 1.0]) if made is None else made(), 0.5)
    assert "\n" not in str(caught.value)


def test_importing_the_library_compiles_nothing() -> None:
    """numba is imported with the simulator only."""
    code = "import sys, helm_rl.observation, helm_rl.profiles.model; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Tenants


def test_each_tenant_has_its_slo_and_those_of_higher_priority_go_first() -> None:
    """Two of each come at once, one in a batch: those of the second tenant first. No link: a token's rows take 2 ns."""
    tenants = [{"name": "a", "slo_ms": 25}, {"name": "b", "priority": 1, "weight": 2}]
    small = scenario(tenant=tenants, slo_ms=15, hardware__link_gb_s=1e4, hardware__max_batch=1, model__candidates=0)
    # The first arrives a little before the others, which wait until it is done.
    made = trace([0.0, 0.1, 0.1, 0.1], history=2000, new=2000, tenant=[0, 0, 1, 1])
    node = NodeSim(small, made, 0.5)
    windows = serve(node, 10 * SECOND)
    batch_ms = A100.batch_ms + 2000 * TOKEN_MS + 0.5 * 2000**2 * PAIR_MS
    turn = np.array([1, 4, 2, 3])
    expected = turn * batch_ms + A100.request_ms - np.array([0.0, 0.1, 0.1, 0.1])
    assert node.latency_ms == pytest.approx(expected, rel=1e-4)
    slo_ms = np.array([25.0, 25.0, 15.0, 15.0])
    assert total(windows, "slow") == np.count_nonzero(expected > slo_ms)
    assert 0 < total(windows, "slow") < np.count_nonzero(expected > 15)
    assert total(windows, "log_latency_sum") == pytest.approx(np.log(expected / slo_ms).sum(), rel=1e-4)


def test_nobody_gives_way_to_a_request_that_is_refused_anyway() -> None:
    """Two wait and the queue is full when one of a higher priority comes whose history 26 pages cannot hold."""
    small = scenario(
        tenant=[{"name": "a"}, {"name": "b", "priority": 1}],
        hardware__queue_bound=2,
        hardware__max_batch=1,
        hardware__link_gb_s=1e4,
    )
    made = trace([0.0, 0.3, 0.4, 0.5], history=[3000, 3000, 3000, 27 * 128], new=1, tenant=[0, 0, 0, 1])
    node = NodeSim(small, made, 0.9)
    node.drain()
    assert (node.latency_ms == SHED_FACTOR * small.slo_ms).tolist() == [False, False, False, True]


def test_without_tenants_in_the_scenario_a_trace_has_one() -> None:
    made = [trace([0.0, 0.1, 0.1], history=500, tenant=who) for who in ([0, 0, 0], [7, 3, 5])]
    nodes = [NodeSim(scenario(), each, 0.5) for each in made]
    assert serve(nodes[0]) == serve(nodes[1])
    assert np.array_equal(nodes[0].latency_ms, nodes[1].latency_ms)


# Telemetry


def test_a_sample_of_the_requests_is_unbiased_and_changes_no_latency(load: tuple[Scenario, Trace]) -> None:
    """A request that is measured with probability p counts 1 / p: its x adds x^2 (1 / p - 1) to the variance."""
    _, made = load
    sample = 0.25
    crowded = {"hardware__link_gb_s": 0.0025, "hardware__queue_bound": 8}
    nodes = [NodeSim(scenario(**crowded, telemetry__sample=p), made, 0.5) for p in (1.0, sample)]
    every, some = (node.run(made.end_ns + 1000 * SECOND) for node in nodes)
    took = nodes[0].latency_ms.astype(np.float64)
    assert np.array_equal(nodes[1].latency_ms, nodes[0].latency_ms)
    n = len(made)
    ratio = took / 100.0
    taken = (took != 100 * SHED_FACTOR) * 1.0
    history = made.history_tokens * taken
    rows = 4.0 * (made.history_tokens + 64.0) * taken  # at most
    tail_cost = np.where(ratio <= 2, ratio**4, 16 * (1 + np.log(np.maximum(ratio, 2) / 2)))
    again = np.array([made.user[i] in made.user[:i] for i in range(n)])
    for field, each in {
        "returning": again * 1.0,
        "completed": np.ones(n),
        "slow": (ratio > 1) * 1.0,
        "shed": 1 - taken,
        "history_tokens": history,
        "history_tokens_hit": history,
        "rows": rows,
        "rows_hit": rows,
        "log_latency_sum": np.log(ratio),
        "tail_cost_sum": tail_cost,
        "latency_ms_sum": took,
    }.items():
        error = math.sqrt((each**2).sum() * (1 / sample - 1))
        assert getattr(every, field) > 0, field
        assert getattr(some, field) != getattr(every, field), field
        assert abs(getattr(some, field) - getattr(every, field)) < 4 * error + 1, field
    assert every.completed == n
    assert some.completed == 4 * round(some.completed / 4)
    for field in ("arrivals", "link_busy_ns", "compute_busy_ns", "queue", "fetched_bytes", "moved_pages", "alpha"):
        assert getattr(some, field) == getattr(every, field), field
    assert some.p99_ms == pytest.approx(every.p99_ms, rel=0.2)


# Refill in the background

IDLE = [30_000.0, 60_000.0]  # the node starts at 0


def cached(node: NodeSim) -> npt.NDArray[np.bool_]:
    """Tell of each row that the node simulates, by popularity, whether it is cached."""
    strata = int(node.state.rows.edges[-1])
    found = np.zeros(strata, np.bool_)
    embedding.contains(node.state.emb, np.zeros(strata, np.int16), np.arange(strata), strata, found)
    return found


def test_new_pages_are_filled_with_the_most_popular_rows_that_are_missing() -> None:
    """From 77 to 154 pages of 2 MiB: 161 MB, at a fifth of .1 GB/s in pieces of 1 MiB, one every 52 ms, for 8 s.

    The node passes over 157,696 rows that it has before it finds one that it lacks: 10 ticks of 10 ms.
    """
    small = scenario(control__migrate_pages_per_s=1e5)
    node = NodeSim(small, trace(IDLE), 0.3)
    node.run(SECOND)
    rows = node._sampled_rows
    first = int(np.flatnonzero(~cached(node))[0])
    assert first == 77 * rows
    node.set_target(0.6)
    refilled = 0.0
    for second in range(2, 5):
        refilled += node.run(second * SECOND).refilled_bytes
        asked = 0.2 * 0.1e9 * (second - 1.1)
        assert refilled == pytest.approx(asked, abs=1.1 * 2**20)
        # In order of popularity, and each row stands for 1 / rate rows of 512 bytes.
        found = cached(node)
        came = int(np.flatnonzero(~found)[0]) - first
        assert not found[first + came + 1 :].any()
        assert came * 512 / node.rate == pytest.approx(refilled, abs=512 / node.rate + 1)
    for second in range(5, 12):
        refilled += node.run(second * SECOND).refilled_bytes
    room = 77 * 2**21
    assert room <= refilled <= room + 2 * 2**20  # what comes of a last piece finds no room
    # All but those few whose set of the index was full.
    assert np.count_nonzero(cached(node)[: 154 * rows]) > 0.9998 * 154 * rows
    assert embedding.unfilled_slots(node.state.emb, 1) == 0
    assert node.run(12 * SECOND).refilled_bytes == 0


@pytest.mark.parametrize(("link_gb_s", "share"), [(1.5, 0.2), (1.5, 1.0), (0.4, 0.05)])
def test_the_refill_has_its_share_of_any_link(link_gb_s: float, share: float) -> None:
    small = scenario(hardware__link_gb_s=link_gb_s, hardware__refill_share=share, control__migrate_pages_per_s=1e5)
    node = NodeSim(small, trace(IDLE), 0.1)
    node.set_target(0.9)
    node.run(SECOND // 10)
    came = node.run(SECOND // 10 + SECOND // 5).refilled_bytes
    assert came == pytest.approx(share * link_gb_s * 1e9 * 0.2, abs=1.1 * 2**20 + 0.01 * share * link_gb_s * 2e8)


def test_refill_goes_on_while_pages_still_come() -> None:
    """20 pages a second for 5 s: at any time, what came over the link is in the cache."""
    node = NodeSim(scenario(control__migrate_pages_per_s=20), trace(IDLE), 0.3)
    first = int(np.flatnonzero(~cached(node))[0])
    node.set_target(0.7)
    refilled = 0.0
    for second in range(1, 5):
        window = node.run(second * SECOND)
        refilled += window.refilled_bytes
        assert window.backlog_pages > 0
        came = int(np.flatnonzero(~cached(node))[0]) - first
        assert came * 512 / node.rate == pytest.approx(refilled, rel=0.02)
        assert refilled == pytest.approx(20e6 * (second - 0.1), abs=1.1 * 2**20)


def test_nothing_is_refilled_when_pages_leave() -> None:
    node = NodeSim(scenario(), trace(IDLE), 0.6)
    node.set_target(0.3)
    assert node.run(5 * SECOND).refilled_bytes == 0
    node.set_target(0.6)
    growing = node.run(6 * SECOND).refilled_bytes
    assert growing > 15e6
    node.set_target(0.3)  # turned round midway: the piece that is under way is the last
    assert node.run(7 * SECOND).refilled_bytes <= 2**20
    assert node.run(12 * SECOND).refilled_bytes == 0


@pytest.mark.parametrize("change", ["items", "share"])
def test_where_nothing_is_refilled(change: str) -> None:
    """What is popular among the items of a log, a node cannot know; and a share of nothing is nothing."""
    if change == "items":
        items = np.random.default_rng(0).integers(0, 50_000, 2_000)
        made = trace(IDLE, history=1000, new=1000, items=items.tolist(), content="items")
        node = NodeSim(scenario(), made, 0.3)
    else:
        node = NodeSim(scenario(hardware__refill_share=0.0), trace(IDLE), 0.3)
    node.set_target(0.6)
    window = node.run(10 * SECOND)
    assert window.moved_pages == 77
    assert window.refilled_bytes == 0


def test_hits_recover_sooner_with_refill() -> None:
    """Few requests, one every 100 ms; .3 of the pool's rows become .6 of them."""
    n = 150
    made = trace((np.arange(n) * 100.0).tolist(), history=50, new=50)
    hits = []
    for share in (0.0, 0.2, 1.0):
        node = NodeSim(
            scenario(hardware__refill_share=share, hardware__link_gb_s=0.4, control__migrate_pages_per_s=1e5), made, 0.3
        )
        node.run(5 * SECOND)
        node.set_target(0.6)
        windows = [node.run(second * SECOND) for second in range(6, 16)]
        hits.append([1 - window.rows_hit / window.rows for window in windows])
    for misses in pairwise(hits):
        assert sum(misses[0]) > sum(misses[1])
    # The law says what 154 pages of its tail leave over, against 77.
    assert hits[2][-1] < 0.93 * hits[0][-1]


# Saved and restored


def test_a_restored_node_serves_on_as_the_first_time_and_so_does_another() -> None:
    """With a host tier in use, tenants, a sample, and a refill under way."""
    small = scenario(
        hardware__kv_host_gib=0.1,
        hardware__kv_miss="onboard",
        tenant=[{"name": "a"}, {"name": "b", "priority": 1}],
        telemetry__sample=0.5,
    )
    made = generate(small, seed=3)
    made.tenant[:] = made.user % 2
    node = NodeSim(small, made, 0.5)
    node.run(3 * SECOND)
    node.set_target(0.6)
    before = node.run(3 * SECOND + SECOND // 4)
    assert before.refilled_bytes > 0
    assert node.state.clocks[loop.REFILL_FROM] != loop.NONE
    assert node.state.host.counters[kv_host.ONBOARDED] > 0
    saved = node.save()

    def rest(node: NodeSim) -> tuple[list[WindowStats], npt.NDArray[np.float32]]:
        windows = []
        for second, alpha in ((10, 0.2), (15, 0.8), (20, 0.5)):
            windows.append(node.run(second * SECOND - SECOND // 2))
            node.set_target(alpha)
            windows.append(node.run(second * SECOND))
        node.drain()
        return windows, node.latency_ms.copy()

    first, first_ms = rest(node)
    other = NodeSim(small, made, 0.3)
    other.run(9 * SECOND)  # wherever it is
    for each in (node, other):
        each.restore(saved)
        again, again_ms = rest(each)
        assert again == first
        assert np.array_equal(again_ms, first_ms)
    assert min(window.alpha for window in first) == pytest.approx(0.2, abs=0.01)
    assert sum(window.refilled_bytes for window in first) > 0


def test_a_history_that_no_memory_can_hold_is_refused_and_the_next_ones_are_served() -> None:
    """128 pages of 128 tokens for histories: 16,384 tokens fit, and one more does not."""
    made = trace([0.0, 1000.0, 2000.0], user=[0, 1, 2], history=[16_385, 16_384, 100], new=1)
    node = NodeSim(scenario(load__history_max=1 << 20), made, 0.5)
    windows = serve(node, SECOND)
    assert [window.shed for window in windows] == [1, 0, 0]
    assert node.latency_ms[0] == SHED_FACTOR * 100
    assert (node.latency_ms[1:] < 5_000).all()


def test_a_trace_measured_from_long_before_its_first_request_is_refused() -> None:
    """An interval is a window that is kept: so many of them never end."""
    made = trace([0.0, 10.0])
    base = made.meta.phases[0].model_copy(update={"start_ns": -(2**61)})
    far = dataclasses.replace(made, meta=made.meta.model_copy(update={"measure_from_ns": -(2**61), "phases": (base,)}))
    far.validate()
    with pytest.raises(UserError, match=r"lasts 2,305,843,009 s, more than 1,000,000 intervals"):
        NodeSim(scenario(), far)


def test_a_host_tier_larger_than_can_be_simulated_is_refused() -> None:
    with pytest.raises(UserError, match=r"kv_host_gib = 1000 holds 16384000 pages .* at most 8388608"):
        NodeSim(scenario(hardware__kv_host_gib=1000.0, hardware__page_kib=64), trace([0.0]))
