"""`helm-rl eval telemetry`: every option reaches the node, ratios by hand, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.serving.replay import Replay
from eval.routing import Alphas
from eval.sweep import Work
from eval.telemetry import OPTIONS, Args, Result, main, measure
from helm_rl.control.protocol import Controller
from helm_rl.control.static import StaticAlpha
from helm_rl.errors import UserError
from helm_rl.scenario import Scenario, load_scenario
from helm_rl.workloads.trace import Trace
from tests.envs.worlds import scenario
from tests.eval.test_routing import SCENARIO


def test_every_option_is_served_with_the_same_arrivals_and_a_controller_of_its_own() -> None:
    calls: list[tuple[Any, ...]] = []

    def replay(scenario: Scenario, trace: Trace, controller: Controller, *, alpha0: float, seed: int) -> Replay:
        calls.append((scenario.telemetry, trace.meta.seed, id(controller), alpha0, seed))
        cost = 1 + scenario.telemetry.delay_s + scenario.telemetry.loss * 10 - np.log10(scenario.telemetry.sample)
        latency_ms = np.full(len(trace), cost * (10 + seed), np.float32)
        empty = np.zeros(0)
        return Replay(latency_ms, trace.arrival_ns >= 0, empty, empty, empty, [], 1.0, 0.0, 0.0)  # type: ignore[arg-type]

    controllers: list[Controller] = []

    def make() -> Controller:
        controllers.append(StaticAlpha(0.5))
        return controllers[-1]

    work = Work(1, replay=replay)
    result = measure(scenario(seconds=4), work, make, 0.7, 2, 5, "static")
    work.close()
    assert [call[0] for call in calls[:9]] == [section for _, section in OPTIONS.values()]
    assert {call[1:2] + call[3:] for call in calls} == {(1_000_005, 0.7, 5), (1_000_006, 0.7, 6)}
    assert len({id(controller) for controller in controllers}) == len(calls) == 18
    assert result.p99_ms["late_5s"] == pytest.approx([6 * 15, 6 * 16])
    assert result.ratios("all") == pytest.approx([38, 38])
    figures = result.figures()
    assert figures["telemetry.sampled_hundredth.ratio"].value == pytest.approx(3)
    assert figures["telemetry.lost_half.p99_ms"].value == pytest.approx(6 * 15.5)
    assert len(figures) == 18


def test_ratios_are_of_the_same_draw() -> None:
    tails = {option: [20.0, 40.0] for option in OPTIONS} | {"late_1s": [30.0, 40.0]}
    result = Result(load_scenario("burst"), tails, "x")
    assert result.ratios("late_1s") == [1.5, 1.0]
    assert result.figures()["telemetry.late_1s.ratio"].value == 1.25
    assert result.figures()["telemetry.as_it_is.ratio"].value == 1.0


def test_from_start_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.telemetry.find_alphas", lambda *_: Alphas(0.7, 0.75, 0.65, 0.7))
    path = tmp_path / "tiny.toml"
    path.write_text(SCENARIO)
    main(Args(scenario=str(path), seeds=1, json=tmp_path / "figures.json"))
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert figures["telemetry.as_it_is.ratio"]["value"] == 1.0
    assert all(figures[f"telemetry.{option}.p99_ms"]["value"] > 1 for option in OPTIONS)
    assert figures["telemetry.late_30s.ratio"]["value"] != 1.0
    assert figures["telemetry.sampled_hundredth.ratio"]["value"] != 1.0
    shown = capsys.readouterr().out
    assert "a rule: alpha 0.75, above a hot-user ratio of 0.70 0.65" in shown
    assert "30 s late" in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scenario": "steady"}, "scenario steady has no .*so no bursts"),
        ({"seeds": 0}, "--seeds must be at least 1, got 0"),
        ({"seed": -1}, "--seed must lie in"),
        ({"policy": Path("nowhere")}, "nowhere"),
        ({"json": Path(), "overwrite": True}, "is a folder; name a file"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(Args(**change))
