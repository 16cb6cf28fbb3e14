"""The run without sampling: its charges and its queue by hand, and the node beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eval.model.queues import serve, single_server
from eval.model.sampling import (
    latencies_ms,
    linked_loads,
    measure_sampling,
    node_outcomes,
    reference_outcomes,
    regimes,
    serve_unsampled,
)
from helm_rl.errors import UserError
from helm_rl.profiles.hardware import resolve_hardware
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate


def scenario(**load: Any) -> Scenario:
    phase = {"start_s": 1, "seconds": 4, "ramp_s": 1, "rate": 100, "requests_per_visit": 5, "hot_fraction": 0.5}
    base = {"rate": 60, "users": 2_000, "items": 1_000_000, "history_mean": 200, "history_max": 1000}
    return Scenario.model_validate(
        {
            "name": "small",
            "slo_ms": 50,
            "seconds": 6,
            "warm_s": 1,
            "model": {"features_per_token": 8, "candidates": 32},
            "hardware": {"pool_gib": 0.25, "link_gb_s": 0.1},
            "load": base | {"phase": [phase]} | load,
        }
    )


def test_the_reference_queue_by_hand() -> None:
    # Link 1 ms each: ready at 1, 2, 3, 4, 5. The first runs alone until 4; then two until 9, then two until 14.
    took = latencies_ms(np.zeros(5), np.ones(5), np.full(5, 2.0), 1.0, 0.5, 2)
    assert took == pytest.approx([4.5, 9.5, 9.5, 14.5, 14.5])
    took = latencies_ms(np.array([0.0, 5.0, 30.0]), np.array([10.0, 1.0, 2.0]), np.array([1.0, 1.0, 3.0]), 0, 0, 8)
    assert took == pytest.approx([11.0, 7.0, 5.0])


@pytest.mark.parametrize("most", [1, 8])
def test_the_reference_queue_is_the_nodes(most: int) -> None:
    rng = np.random.default_rng(2)
    n = 2_000
    arrival_ns = np.rint(np.cumsum(rng.exponential(1.0, n)) * 1e6).astype(np.int64)
    server = single_server("link", arrival_ns, rng.exponential(0.7, n))
    hardware = server.scenario.hardware.model_copy(update={"max_batch": most})
    server = replace(server, scenario=server.scenario.model_copy(update={"hardware": hardware}))
    profile = resolve_hardware(hardware)
    took = latencies_ms(arrival_ns * 1e-6, server.service_ms, np.zeros(n), profile.batch_ms, profile.request_ms, most)
    assert took.max() > 5
    # A node learns that all rows miss from its first sampled row on; what came before is long over.
    assert serve(server, 100).latency_ms[n // 2 :] == pytest.approx(took[n // 2 :], abs=1e-3)


def test_charges_by_hand() -> None:
    everything = scenario(items=5_000, phase=())  # all rows of a request lie in the cache from the start
    trace = generate(everything, 1)
    charges = serve_unsampled(everything, trace, 0.5, lambda text: None)
    assert charges.link_bytes.sum() <= 512  # but for the last, which rounding may leave out
    assert charges.rows_hit.sum() >= charges.rows.sum() - 1
    assert np.array_equal(charges.rows, (charges.history_tokens - charges.history_tokens_hit + 32) * 8)
    assert 0 < charges.history_tokens_hit.sum() < charges.history_tokens.sum()

    nothing = scenario(items=10**12, zipf_items=0.0, phase=())  # no row comes twice, but of a history read again
    trace = generate(nothing, 1)
    charges = serve_unsampled(nothing, trace, 0.5, lambda text: None)
    first = np.unique(trace.user, return_index=True)[1]
    assert first.size > 100
    # As many are drawn as are read, but for a history's last, partial block, of which it is chance.
    assert charges.link_bytes[first] == pytest.approx(charges.rows[first] * 512, rel=0.15)
    assert charges.link_bytes[first].sum() == pytest.approx(charges.rows[first].sum() * 512, rel=0.005)


def test_links_are_set_by_the_slo() -> None:
    cold = regimes(scenario(), 3.0)[0]
    trace = generate(cold.scenario, 1)
    charges = serve_unsampled(cold.scenario, trace, 0.5, lambda text: None)
    loads = linked_loads(cold, trace, charges)
    (limit,) = reference_outcomes(loads["limit"], trace, charges, cold.parts)
    assert 49 < limit.p99_ms <= 50
    speed = {name: linked.hardware.link_gb_s or 0.0 for name, linked in loads.items()}
    assert speed["moderate"] == pytest.approx(1.5 * speed["limit"])
    (saturated,) = reference_outcomes(loads["saturated"], trace, charges, cold.parts)
    assert saturated.link_ns == pytest.approx(0.9 * 3e9)


def test_the_two_regimes() -> None:
    cold, hot = regimes(scenario(), 3.0)
    assert [(part.name, part.start_ns, part.end_ns) for part in hot.parts] == [
        ("onset", 0, 2 * 10**9),
        ("hot", 2 * 10**9, 5 * 10**9),
    ]
    assert cold.scenario.load.phase == ()
    trace = generate(hot.scenario, 1)
    assert np.count_nonzero(trace.phase == 0) < 5 < np.count_nonzero(trace.phase == 1)
    with pytest.raises(UserError, match="needs a base load and a phase"):
        regimes(scenario(phase=()), 3.0)


def test_a_node_without_sampling_hits_as_the_reference() -> None:
    for regime in regimes(scenario(), 3.0):
        trace = generate(regime.scenario, 1)
        charges = serve_unsampled(regime.scenario, trace, 0.5, lambda text: None)
        exact = reference_outcomes(regime.scenario, trace, charges, regime.parts)[-1]
        found, little = node_outcomes(regime.scenario, trace, regime.parts, 1 << 19, count=True)
        assert little < 0.15  # few requests, few instants
        assert exact.emb_hit_rate < 0.98
        assert found[-1].kv_hit_rate == exact.kv_hit_rate
        assert found[-1].emb_hit_rate == pytest.approx(exact.emb_hit_rate, abs=0.01)
        halved = replace(charges, rows_hit=charges.rows_hit / 2, link_bytes=charges.link_bytes * 2)
        wrong = reference_outcomes(regime.scenario, trace, halved, regime.parts)[-1]
        assert wrong.emb_hit_rate == pytest.approx(exact.emb_hit_rate / 2)
        assert wrong.link_ns == pytest.approx(2 * exact.link_ns)


def test_figures_and_verdict() -> None:
    figures, verdict = measure_sampling(scenario(), 2.0, 1, (1 << 14, 1 << 19), lambda text: None)
    for regime in ("cold", "hot"):
        assert figures[f"model.sampling.emb_hit_error.{regime}"].goal == 0.01
        assert figures[f"model.sampling.emb_hit_error.{regime}.16384"].goal is None
        assert figures[f"model.sampling.p99_error.{regime}.limit"].goal == 0.03
        assert figures[f"model.sampling.p99_error.{regime}.saturated"].goal is None
        assert figures[f"model.sampling.kv_hit_error.{regime}"].value < 1e-9
        assert 48 < figures[f"model.sampling.{regime}.limit.1.p99_ms"].value <= 50
        assert 0 < figures[f"model.sampling.{regime}.limit.1.p99_gain_per_percent"].value < 1
    assert figures["model.sampling.emb_hit_error.onset"].goal is None
    assert verdict.startswith("All goals are reached with ")
