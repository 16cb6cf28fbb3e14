"""Entrants in turns on one schedule: who waits stands still, and all are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.serving.live import LiveNode
from eval.live.contest import Entrant, Result, contest
from eval.sweep import sweep
from helm_rl.control.protocol import FloatArray
from helm_rl.control.static import StaticAlpha
from helm_rl.runtime.steering import Steering
from helm_rl.scenario import Scenario, load_scenario
from helm_rl.workloads.generate import generate
from tests.eval.live.small import SMALL


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    (tmp_path / "small.toml").write_text(SMALL)
    loaded = load_scenario(tmp_path / "small.toml")
    return loaded.model_copy(update={"seconds": 3.0, "warm_s": 0.5})


class Up(StaticAlpha):
    """Asks for .8 from the second decision on."""

    def __init__(self) -> None:
        super().__init__(0.8)
        self.seen: list[int] = []

    def decide(self, observation: FloatArray, applied_alpha: float, now_ns: int) -> float:
        self.seen.append(now_ns)
        assert observation.shape == (17,)
        return 0.8 if len(self.seen) > 1 else 0.3


def test_all_serve_the_same_schedule_in_turns_and_a_controller_sees_no_pause(scenario: Scenario) -> None:
    trace = generate(scenario, seed=5)
    told: list[tuple[str, float]] = []
    up = Up()
    found = contest(
        scenario,
        trace,
        [Entrant("low", "low", 0.2), Entrant("up", "up", 0.3, Steering(up)), Entrant("high", "high", 0.7)],
        block_s=1.0,
        warm_s=0.5,
        table_rows=1 << 12,
        verify=True,
        advance=lambda title, seconds: told.append((title, seconds)),
    )
    blocks = [title for title, seconds in told if seconds]
    assert blocks == ["low", "up", "high", "up", "high", "low", "high", "low", "up"]
    assert sum(seconds for _, seconds in told) == pytest.approx(9.0)
    measured = int((trace.arrival_ns >= 0).sum())
    for result in found.values():
        assert result.latency_ms.size == measured
        assert np.isfinite(result.latency_ms).all()
        assert result.wrong_scores == 0
        # It stood still while others were served, which took at least 4 s: or these requests would be as late.
        assert result.time_ns.max() < 3_600_000_000
    assert np.ptp(found["low"].alpha) == np.ptp(found["high"].alpha) == 0
    assert found["low"].alpha[0] == pytest.approx(0.2, abs=0.01)
    assert found["up"].alpha[0] == pytest.approx(0.3, abs=0.01)
    assert found["up"].alpha[-1] > 0.5
    assert found["up"].pages_moved > 100
    assert found["low"].decisions == found["high"].decisions == 0
    # Decisions fall by the node's clock, .5 s apart.
    assert found["up"].decisions == len(up.seen)
    assert len(up.seen) == pytest.approx(up.seen[-1] / 0.5e9, abs=1.5)
    assert np.diff(up.seen).min() > 0.4e9
    assert np.diff(up.seen).max() < 1.6e9


def test_a_request_that_is_lost_ends_it(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.live.lost.PATIENCE_S", 0.2)
    serve = LiveNode._serve_batch

    def lose(node: LiveNode, batch: Any) -> None:
        if kept := [one for one in batch if one.number % 50]:
            serve(node, kept)
        for one in batch:
            if not one.number % 50 and one.lease is not None:
                one.lease.release()

    monkeypatch.setattr(LiveNode, "_serve_batch", lose)
    with pytest.raises(RuntimeError, match=r"\d requests were neither served nor shed"):
        contest(
            scenario.model_copy(update={"seconds": 1.0}),
            generate(scenario.model_copy(update={"seconds": 1.0}), seed=5),
            [Entrant("low", "low", 0.2)],
            block_s=1.0,
            warm_s=0.5,
            table_rows=1 << 12,
        )


def test_figures_of_a_result(scenario: Scenario) -> None:
    latency_ms = np.concatenate([np.linspace(1, 100, 98), [600.0, 50_000.0]])
    longer = scenario.model_copy(update={"seconds": 12.0})
    swept = sweep(longer, generate(longer, seed=5), [0.2, 0.4, 0.6])
    time_ns = np.arange(0, 12_000_000_000, 250_000_000)
    best = swept.settled[0].best
    result = Result(latency_ms, time_ns, np.full(time_ns.size, best - 0.15), 0, 0, 0)
    assert result.p99_ms == 600
    assert result.within(500.0) == 0.98
    assert result.shed(500.0) == 1
    # Latencies are kept in float32: 3333.3 ms is one of its numbers only nearly.
    refused = Result(np.array([1.0, np.float32(3333.3), 9000.0]), time_ns, time_ns, 0, 0, 0)
    assert refused.shed(33.333) == 1
    assert len(swept.settled) == 1
    assert result.ratio_gap(swept) == pytest.approx(0.15)
