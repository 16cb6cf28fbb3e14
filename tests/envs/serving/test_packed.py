"""Nodes in memory: what is taken up from rows of one array serves as the nodes do by themselves."""

from __future__ import annotations

import numpy as np

from cache_engine.jit import MOST_BYTES
from envs.serving import loop, packed
from envs.serving.node import NodeSim
from helm_rl.workloads.generate import generate
from tests.envs.worlds import QUICK, scenario

SECOND = 1_000_000_000


def unlike() -> list[NodeSim]:
    """Nodes of different sizes, policies, tiers and alphas."""
    made = generate(scenario(), seed=2)
    return [
        NodeSim(scenario(hardware__kv_host_gib=0.1, **QUICK), made, 0.8),
        NodeSim(scenario(hardware__emb_policy="sieve", **QUICK), made, 0.2),
        NodeSim(scenario(hardware__pool_gib=1 / 32, hardware__page_kib=512), made, 0.5, max_sampled_slots=1 << 12),
        NodeSim(scenario(tenant=[{"name": "only", "priority": 3}], **QUICK), made, 0.5),
    ]


def test_nodes_are_taken_up_from_rows_of_one_array_in_any_order() -> None:
    alone, together = unlike(), unlike()
    for node in alone:
        node.set_target(0.6)
        node.run(6 * SECOND)
    nodes = np.stack([node.packed for node in together])
    assert nodes.shape == (4, MOST_BYTES)
    for node in together:
        node.set_target(0.6)
    rng = np.random.default_rng(0)
    for until_ns in range(-4 * SECOND, 6 * SECOND + 1, SECOND // 4):
        for k in rng.permutation(4):
            packed.run(nodes[k], until_ns)
    for one, other in zip(alone, together, strict=True):
        assert np.count_nonzero(~np.isnan(one.latency_ms)) > 300
        assert np.array_equal(one.latency_ms, other.latency_ms, equal_nan=True)
        assert np.array_equal(one.state.clocks, other.state.clocks)
        assert np.array_equal(one.state.emb.counters, other.state.emb.counters)
        assert np.array_equal(one.state.kv.counters, other.state.kv.counters)
        assert one.alpha == other.alpha


def test_what_is_packed_is_the_node_and_no_copy() -> None:
    """A target set and a state restored afterwards hold for it too."""
    first, second = unlike()[:2]
    saved = first.save()
    packed.run(first.packed, 3 * SECOND)
    assert first.state.clocks[loop.NEXT_REQUEST] == np.searchsorted(first.trace.arrival_ns, 3 * SECOND)
    latency_ms = first.latency_ms.copy()
    first.restore(saved)
    assert np.isnan(first.latency_ms).all()
    packed.run(first.packed, 3 * SECOND)
    assert np.array_equal(first.latency_ms, latency_ms, equal_nan=True)
    assert np.isnan(second.latency_ms).all()  # each packed array is of its own node
    first.reset(0.3)
    packed.run(first.packed, 3 * SECOND)
    assert not np.array_equal(first.latency_ms, latency_ms, equal_nan=True)
