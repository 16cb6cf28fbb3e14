"""The node's host tier of keys and values: how users come back from it, worked out by hand, and who is in it.

A pool of 256 pages of 2 MiB; one holds 128 tokens of decoder-0.2b. At alpha .9, 26 of them are for keys and values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cache_engine.backends.cpu import kv, kv_host
from envs.serving.node import NodeSim
from helm_rl.metrics import WindowStats
from helm_rl.profiles.hardware import HARDWARE, ONBOARD_BATCH
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate
from helm_rl.workloads.trace import Trace
from tests.envs.worlds import QUICK, scenario, trace

SECOND = 1_000_000_000
A100 = HARDWARE["a100-80g"]
TOKEN_MS = A100.prefill_ns(2 * 16 * (1024 * (2 * 1024 + 2 * 256) + 3 * 1024 * 2816), 0.0) * 1e-6
PAIR_MS = A100.prefill_ns(0.0, 4 * 16 * 16 * 64) * 1e-6
PAGE_BYTES = 2 << 20
PAGE_TOKENS = 128
ROW_BYTES = 512
PAGES_PER_GIB = 512


def tiered(**changes: Any) -> Scenario:
    """A tier of 2 GiB, larger than the pool, and a link too fast to matter."""
    given = {"kv_host_gib": 2.0, "kv_miss": "onboard", "link_gb_s": 1e4}
    return scenario(
        **{f"hardware__{name}": value for name, value in given.items()} | {"model__candidates": 10} | changes
    )


def in_turn(users: list[int], history: int = 1024) -> Trace:
    """One request a second, of histories without a new event."""
    return trace((1000.0 * np.arange(len(users))).tolist(), user=users, history=history, new=0)


def serve(node: NodeSim) -> list[WindowStats]:
    """Return a window of each second, in which one request arrives and is served."""
    return [node.run((second + 1) * SECOND) for second in range(len(node.trace))]


def pcie_ms(pages: int, gb_s: float = A100.pcie_gb_s) -> float:
    return A100.onboard_ms + pages * PAGE_BYTES / gb_s * 1e-6


def pcie_busy_ms(pages: int, gb_s: float = A100.pcie_gb_s) -> float:
    return A100.onboard_ms / ONBOARD_BATCH + pages * PAGE_BYTES / gb_s * 1e-6


def rest_ms(found: int, history: int = 1024, candidates: int = 10) -> float:
    """What takes neither link nor PCIe."""
    fresh = history - found
    work = (fresh + candidates) * TOKEN_MS + (fresh * (found + fresh / 2) + candidates * history) * PAIR_MS
    return A100.batch_ms + A100.request_ms + work


# Three users of 8 pages fit; the fourth takes 6 from the first, of whom 2 pages, 256 tokens, stay in the pool.
FOUR = [0, 1, 2, 3, 0]


def test_who_was_evicted_comes_back_over_pcie() -> None:
    node = NodeSim(tiered(), in_turn(FOUR), 0.9)
    windows = serve(node)
    came = [rest_ms(0)] * 4 + [rest_ms(1024) + pcie_ms(6)]
    assert node.latency_ms == pytest.approx(came, rel=1e-4)
    assert [window.history_tokens_hit for window in windows] == [0, 0, 0, 0, 1024]
    counters = node.state.host.counters
    assert counters[kv_host.ONBOARDED] == 6
    assert counters[kv_host.OFFLOADED] == 12  # the second user made room for what came back


def test_without_a_tier_and_with_one_that_is_not_asked_it_is_computed_anew() -> None:
    for changes in ({"hardware__kv_host_gib": 0.0}, {"hardware__kv_miss": "recompute"}):
        node = NodeSim(tiered(**changes), in_turn(FOUR), 0.9)
        windows = serve(node)
        assert node.latency_ms[4] == pytest.approx(rest_ms(256), rel=1e-4)
        assert windows[4].history_tokens_hit == 256


@pytest.mark.parametrize("link", ["remote-ps", "local-host"])
@pytest.mark.parametrize("pcie_gb_s", [0.5, 50.0])
@pytest.mark.parametrize("link_gb_s", [0.01, 1.0])
def test_pages_come_beside_the_rows_of_a_parameter_server_and_after_those_of_the_host(
    link: str, pcie_gb_s: float, link_gb_s: float
) -> None:
    changes = {"link": link, "pcie_gb_s": pcie_gb_s, "link_gb_s": link_gb_s}
    small = tiered(**{f"hardware__{name}": value for name, value in changes.items()}, model__candidates=100)
    node = NodeSim(small, in_turn(FOUR), 0.9)
    last = serve(node)[-1]
    busy_ms = pcie_busy_ms(6, pcie_gb_s)
    rows_ms = (last.fetched_bytes - 6 * PAGE_BYTES) / link_gb_s * 1e-6
    assert 0 < rows_ms < 100 * 4 * ROW_BYTES / link_gb_s * 1e-6  # of the candidates' rows some are cached
    link_ms = rows_ms if link == "remote-ps" else rows_ms + busy_ms
    took_ms = max(link_ms, pcie_ms(6, pcie_gb_s))
    assert node.latency_ms[4] == pytest.approx(took_ms + rest_ms(1024, candidates=100), rel=1e-4)
    assert last.link_busy_ns * 1e-6 == pytest.approx(link_ms, rel=1e-4)


def test_recomputing_is_as_if_there_were_no_tier() -> None:
    small = scenario(**QUICK)
    made = generate(small, seed=5)
    nodes = [
        NodeSim(scenario(hardware__kv_host_gib=gib, hardware__kv_miss="recompute", **QUICK), made, 0.7)
        for gib in (0.0, 1.0)
    ]
    windows: list[list[WindowStats]] = []
    for node in nodes:
        windows.append([])
        for second, alpha in ((4, 0.9), (8, 0.3), (20, 0.6)):
            windows[-1].append(node.run(second * SECOND))
            node.set_target(alpha)
        node.drain()
    assert windows[0] == windows[1]
    assert np.array_equal(nodes[0].latency_ms, nodes[1].latency_ms)
    assert nodes[1].state.host.counters[kv_host.OFFLOADED] > 100


@pytest.mark.parametrize(
    ("link", "link_gb_s", "candidates", "history", "pcie_gb_s", "better"),
    [
        ("remote-ps", 1e4, 10, 1024, 20.0, "recompute"),  # the fixed cost alone is more than the prefill
        ("remote-ps", 1e4, 10, 3072, 0.2, "recompute"),
        ("remote-ps", 0.01, 10, 3072, 20.0, "onboard"),  # rows that need not be fetched
        ("local-host", 0.01, 10, 3072, 20.0, "onboard"),
        ("remote-ps", 0.1, 20_000, 1024, 20.0, "onboard"),  # the candidates' rows take longer than PCIe in any case
        ("local-host", 1e4, 20_000, 1024, 20.0, "recompute"),
    ],
)
def test_the_cheaper_way_is_the_faster_one(
    link: str, link_gb_s: float, candidates: int, history: int, pcie_gb_s: float, better: str
) -> None:
    took = {}
    for way in ("recompute", "onboard", "cheaper"):
        changes = {"link": link, "link_gb_s": link_gb_s, "pcie_gb_s": pcie_gb_s, "kv_miss": way}
        small = tiered(**{f"hardware__{name}": value for name, value in changes.items()}, model__candidates=candidates)
        node = NodeSim(small, trace((100_000.0 * np.arange(5)).tolist(), user=FOUR, history=history, new=0), 0.9)
        node.drain()
        took[way] = float(node.latency_ms[4])
    other = "onboard" if better == "recompute" else "recompute"
    assert took["cheaper"] == took[better] < took[other]


def test_a_full_tier_gives_up_its_least_recent() -> None:
    """Eight pages. The fourth and fifth user push out the first (8 pages, tail first), then 6 pages of the second, for
    which the first gives up 6 of his: 2 are left, and come back.
    """
    node = NodeSim(tiered(hardware__kv_host_gib=8 / PAGES_PER_GIB), in_turn([0, 1, 2, 3, 4, 0]), 0.9)
    node.run(4 * SECOND)
    host = node.state.host
    assert host.counters[: kv_host.HOST_HITS].tolist() == [6, 0, 0]
    node.run(5 * SECOND)
    assert host.counters[: kv_host.HOST_HITS].tolist() == [14, 0, 6]
    assert host.scalars[kv.USED] == 8
    window = node.run(6 * SECOND)
    assert window.history_tokens_hit == 2 * PAGE_TOKENS
    assert node.latency_ms[5] == pytest.approx(rest_ms(2 * PAGE_TOKENS) + pcie_ms(2), rel=1e-4)


def test_a_tier_that_holds_everybody_finds_all_that_was_ever_computed() -> None:
    changes = {"hardware__kv_host_gib": 4.0, "hardware__kv_miss": "onboard", **QUICK}
    small = scenario(**changes)
    made = generate(small, seed=6)
    node = NodeSim(small, made, 0.7)  # 77 pages of 16 tokens: room for the longest history, and hardly for two
    found = node.run(made.end_ns + 100 * SECOND)
    assert found.shed == 0
    computed: dict[int, int] = {}
    expected = 0
    for user, history, new in zip(
        made.user.tolist(), made.history_tokens.tolist(), made.new_tokens.tolist(), strict=True
    ):
        expected += min(computed.get(user, 0), history - new)
        computed[user] = max(computed.get(user, 0), history)
    assert found.history_tokens_hit == expected
    assert node.state.host.counters[kv_host.ONBOARDED] > 1000
    assert node.state.host.counters[kv_host.GIVEN_UP] == 0


@pytest.mark.parametrize("policy", ["lru", "sieve"])
def test_pages_that_change_hands_leave_their_blocks_in_the_tier(policy: str) -> None:
    """20 users of 8 pages in 230 pages; then there are 26: the last 3 users and 2 pages of the one before."""
    users = [*range(20), 0]
    small = tiered(hardware__emb_policy=policy, control__migrate_pages_per_s=1e5)
    node = NodeSim(small, in_turn(users), 0.1)
    node.run(20 * SECOND - SECOND // 2)
    host = node.state.host
    assert host.scalars[kv.USED] == 0
    node.set_target(0.9)
    window = node.run(20 * SECOND)
    assert window.moved_pages == 204
    assert host.scalars[kv.USED] == host.counters[kv_host.OFFLOADED] == 20 * 8 - 26
    last = node.run(21 * SECOND)
    assert last.history_tokens_hit == 1024
    assert node.latency_ms[20] == pytest.approx(rest_ms(1024) + pcie_ms(8), rel=1e-4)


def test_onboarding_takes_pcie_in_turn() -> None:
    """Two users come back at once: the second's pages wait for the first's, and share the fixed cost with them."""
    made = trace([0.0, 1000.0, 2000.0, 3000.0, 4000.0, 5000.0, 5000.0], user=[0, 1, 2, 3, 4, 0, 1], history=1024, new=0)
    node = NodeSim(tiered(hardware__pcie_gb_s=0.5), made, 0.9)
    node.drain()
    # Of the second, 2 pages are in the pool when both come back, and leave it for what the first brings.
    assert node.latency_ms[5] == pytest.approx(rest_ms(1024) + pcie_ms(8, 0.5), rel=1e-4)
    assert 2 * pcie_busy_ms(8, 0.5) > pcie_ms(8, 0.5)
    assert node.latency_ms[6] == pytest.approx(rest_ms(1024) + 2 * pcie_busy_ms(8, 0.5), rel=1e-4)
