"""The model clock beside the live node: loads, service times replayed, fixed costs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envs.serving.live import ServiceTimes
from envs.serving.node import NodeSim
from eval.live import errors
from eval.live.errors import Measured, Usage, at_busy, base_load, fixed_ms, replay_times, served_alone, slowdown
from eval.live.ladder import flop
from helm_rl.errors import UserError
from helm_rl.profiles.hardware import resolve_hardware
from helm_rl.profiles.model import resolve_model
from helm_rl.scenario import Scenario, load_scenario
from helm_rl.workloads.generate import generate
from tests.envs.worlds import trace
from tests.eval.live.small import SMALL


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    (tmp_path / "small.toml").write_text(SMALL)
    return load_scenario(tmp_path / "small.toml")


def served(scenario: Scenario, link_ms: list[float], compute_ms: list[float], batch: list[int], **more: Any) -> Any:
    """A node that has served requests 10 ms apart."""
    n = len(link_ms)
    load = trace([10.0 * k for k in range(n)], history=100, new=100)
    times = ServiceTimes(
        np.array(link_ms) * 1e6,
        np.array(compute_ms) * 1e6,
        np.array(batch),
        np.zeros(n, np.int64),
        np.array(more.get("fetched", [0] * n)),
    )
    latency_ms = np.array(more.get("latency_ms", [np.nan] * n), np.float32)
    return SimpleNamespace(scenario=scenario, trace=load, times=times, latency_ms=latency_ms)


def test_service_times_replayed_alone_give_their_sum(scenario: Scenario) -> None:
    fixed = resolve_hardware(scenario.hardware).request_ms
    node = served(scenario, [1.0, 2.0, 3.0], [4.0, 2.0, 5.0], [0, 1, 2])
    assert replay_times(node) == pytest.approx(np.array([5.0, 4.0, 8.0]) + fixed, abs=1e-3)


def test_service_times_replayed_wait_for_link_and_accelerator(scenario: Scenario) -> None:
    """The second waits 5 ms for the link; the third for the accelerator, where the first still is until 45."""
    fixed = resolve_hardware(scenario.hardware).request_ms
    node = served(scenario, [15.0, 5.0, 1.0], [30.0, 7.0, 3.0], [0, 1, 2])
    # On the link 0-15, 15-20, 20-21; computed 15-45, then both others, who are ready, as one batch 45-55.
    assert replay_times(node) == pytest.approx(np.array([45.0, 45.0, 35.0]) + fixed, abs=1e-3)


def test_a_batchs_time_is_shared_out_by_work_and_who_was_not_served_is_left_out(scenario: Scenario) -> None:
    fixed = resolve_hardware(scenario.hardware).request_ms
    node = served(scenario, [1.0, 1.0, 1.0], [8.0, 8.0, np.nan], [0, 0, -1])
    assert replay_times(node)[:2] == pytest.approx([5.0 + fixed] * 2, abs=1e-3)
    assert np.isnan(replay_times(node)[2])


def test_fixed_costs_are_what_is_neither_transfer_nor_compute(scenario: Scenario) -> None:
    """Rows of 32 B at 10 MB/s: 3.2 us each. Who waited for another, or shared a batch, tells nothing."""
    n = 40
    compute, fetched = np.linspace(1.0, 3.0, n), np.arange(n) * 10
    latency = compute + fetched * 0.0032 + 0.7
    latency[5] += 30.0  # a stall
    batch = np.arange(n)
    batch[20] = batch[19]
    latency[[19, 20]] += 5.0
    node = served(
        scenario, [1.0] * n, compute.tolist(), batch.tolist(), fetched=fetched.tolist(), latency_ms=latency.tolist()
    )
    assert fixed_ms(node) == pytest.approx(0.7, abs=1e-4)
    assert served_alone(node).tolist() == [i for i in range(n) if i not in (6, 7, 8, 19, 20)]
    node.latency_ms[:] += 500.0
    with pytest.raises(UserError, match="only 1 requests found the node idle"):
        fixed_ms(node)


def test_what_service_adds_to_the_profiles_time(scenario: Scenario) -> None:
    """Each is computed in 1.25 times what the profile says, but for some that were disturbed."""
    n = 40
    hardware, model = resolve_hardware(scenario.hardware), resolve_model(scenario.model)
    node = served(scenario, [1.0] * n, [0.0] * n, list(range(n)), latency_ms=[5.0] * n)
    linear, pair = flop(model, node.times.prefix, node.trace.history_tokens.astype(np.int64))
    says_ns = np.array([hardware.batch_ms * 1e6 + hardware.prefill_ns(a, b) for a, b in zip(linear, pair, strict=True)])
    node.times.compute_ns[:] = 1.25 * says_ns
    node.times.compute_ns[::5] *= 9
    assert slowdown(node) == pytest.approx(1.25)


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_load_is_scaled_to_the_busy_share_asked_for(scenario: Scenario, share: float) -> None:
    load = at_busy(base_load(scenario, 60.0, 5.0), share, 0.5)
    node = NodeSim(load, generate(load, seed=3), 0.5)
    node.run(0)
    window = node.run(60_000_000_000)
    assert max(window.link_busy_ns, window.compute_busy_ns) / 60e9 == pytest.approx(share, rel=0.1)


def test_the_base_load_is_without_phases(scenario: Scenario) -> None:
    base = base_load(load_scenario("laptop"), 30.0, 5.0)
    assert base.load.phase == ()
    assert (base.seconds, base.warm_s) == (30.0, 5.0)


def test_errors_are_relative_to_what_was_measured() -> None:
    usage = Usage(0, 0, 0, 0)
    live, model = np.linspace(10, 20, 101), np.linspace(11, 25, 101)
    found = Measured(1.0, live, model, 2 * live, usage, usage)
    assert found.error(0.5) == pytest.approx(18 / 15 - 1)
    assert found.error(0.99, replayed=True) == pytest.approx(1.0)


def test_windows_add_up_to_shares() -> None:
    def window(start: int, **counts: Any) -> Any:
        return SimpleNamespace(start_ns=start * 10**9, end_ns=(start + 1) * 10**9, **counts)

    one = window(
        0, history_tokens=10, history_tokens_hit=5, rows=100.0, rows_hit=90.0, link_busy_ns=2e8, compute_busy_ns=0
    )
    two = window(
        1, history_tokens=30, history_tokens_hit=5, rows=0.0, rows_hit=0.0, link_busy_ns=0, compute_busy_ns=1e9
    )
    assert errors.usage([one, two]) == Usage(0.25, 0.9, 0.1, 0.5)
