"""The adapter's measurement: shifted services, false feedback, and the command on a small scenario."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from helm_rl.checkpoint import load_bundle
from helm_rl.control.base import BasePolicy
from helm_rl.control.layers import controller
from helm_rl.control.residual import Residual
from helm_rl.errors import UserError
from helm_rl.export import export
from helm_rl.metrics import WindowStats
from helm_rl.scenario import load_scenario
from tests.helm_rl.control.test_guard import measured
from tests.helm_rl.policies import make_bundle, network
from tests.train.test_on_a_scenario import SCENARIO
from train.fit_residual import FALSE_COST, Args, Feedback, Kept, main, service
from train.variations import _cold_ms


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    make_bundle(tmp_path / "bundle", network(3, scale=0.0))  # never moves: what moves is the adapter
    return tmp_path / "bundle"


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO.replace("alpha_max = 0.8", "alpha_max = 0.9"))
    return str(path)


def test_a_shifted_service_is_about_as_hard() -> None:
    plain = service(Args(policy=Path("none")))
    assert plain == load_scenario("trend")
    shifted = service(Args(policy=Path("none"), hardware="h200", link_gb_s=0.2, zipf_items=0.9))
    assert (shifted.hardware.profile, shifted.hardware.link_gb_s, shifted.load.zipf_items) == ("h200", 0.2, 0.9)
    busy = [[ms * each.load.rate for ms in _cold_ms(each)] for each in (plain, shifted)]
    assert max(new / old for old, new in zip(*busy, strict=True)) == pytest.approx(1.0)


def told(policy: Path, feedback: Feedback, costs: np.ndarray) -> np.ndarray:
    """Return what an adapter is told where requests cost `costs`."""
    adapter = Residual(BasePolicy.load(policy))
    kept = Kept(adapter, feedback, 1)
    seen: list[float] = []

    def listen(window: WindowStats) -> None:
        seen.append(window.tail_cost_sum / window.completed)

    adapter.feedback = listen  # type: ignore[method-assign]
    for cost in costs:
        kept.feedback(measured(100, cost))
    return np.array(seen)


def test_false_feedback_is_false(policy: Path) -> None:
    costs = np.random.default_rng(1).lognormal(-1, 0.5, 500)
    np.testing.assert_allclose(told(policy, "true", costs), costs)
    assert set(told(policy, "constant", costs)) == {FALSE_COST}
    dice = np.log(told(policy, "random", costs))
    assert abs(np.corrcoef(dice, np.log(costs))[0, 1]) < 0.15
    assert dice.std() > 0.5
    assert np.corrcoef(np.log(told(policy, "inverted", costs))[50:], np.log(costs)[50:])[0, 1] < -0.9


def test_what_was_learnt_survives_the_start_of_a_replay(policy: Path) -> None:
    adapter = Residual(BasePolicy.load(policy))
    adapter.net.weights[2][:] = 1.0
    Kept(adapter, "true", 1).reset(7)
    assert (adapter.net.weights[2] == 1.0).all()


def test_the_command_measures_both_and_without_a_bound_they_are_the_same(
    policy: Path, scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = Args(policy=policy, scenario=scenario, intervals=100, draws=2, bound=0.0, json=tmp_path / "f.json")
    main(args)
    figures = {n: f["value"] for n, f in json.loads((tmp_path / "f.json").read_text())["figures"].items()}
    assert figures["residual.gap_ratio"] == 1.0
    assert figures["residual.p99_ratio"] == figures["residual.learning_p99_ratio"] == 1.0
    assert figures["residual.tripped"] == 0
    assert "base + residual" in capsys.readouterr().out
    main(dataclasses.replace(args, bound=0.1, json=tmp_path / "g.json"))
    other = {n: f["value"] for n, f in json.loads((tmp_path / "g.json").read_text())["figures"].items()}
    assert other["residual.gap.base"] == figures["residual.gap.base"]
    assert other["residual.gap.adapted"] != other["residual.gap.base"]


def test_nodes_learn_together_and_without_a_bound_they_are_the_base(
    policy: Path, scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = Args(policy=policy, scenario=scenario, nodes=3, intervals=60, draws=1, bound=0.0, json=tmp_path / "f.json")
    main(args)
    figures = {n: f["value"] for n, f in json.loads((tmp_path / "f.json").read_text())["figures"].items()}
    assert figures["residual.gap_ratio"] == figures["residual.learning_p99_ratio"] == 1.0
    out = " ".join(capsys.readouterr().out.split())
    assert ", 3 nodes: base policy" in out
    assert "nan" not in out  # of one draw there is no bound
    main(dataclasses.replace(args, bound=0.1, json=tmp_path / "g.json"))
    other = {n: f["value"] for n, f in json.loads((tmp_path / "g.json").read_text())["figures"].items()}
    assert other["residual.gap.base"] == figures["residual.gap.base"]
    assert other["residual.gap.adapted"] != other["residual.gap.base"]


def test_what_was_learnt_goes_into_a_bundle(policy: Path, scenario: str, tmp_path: Path) -> None:
    main(Args(policy=policy, scenario=scenario, intervals=100, draws=1, output=tmp_path / "r.json"))
    export(policy, tmp_path / "full", residual=tmp_path / "r.json")
    served = controller(load_bundle(tmp_path / "full"))
    assert served.adapter is not None
    assert served.adapter.learnt().guard.cost.seen > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "--nodes must be at least 1, got 0"),
        ({"nodes": 2, "output": Path("r.json")}, "--output: what nodes learnt together is not kept"),
        ({"intervals": 0}, "--intervals must be at least 1, got 0"),
        ({"hardware": "abacus"}, "--hardware: 'abacus' is unknown; known: a100-80g"),
        ({"link_gb_s": 0.0}, "--link-gb-s must be above 0 and at most 10000, got 0"),
        ({"bound": 2.0}, "residual adapter: bound must be within"),
        ({"seed": 10**6, "draws": 1}, "--seed and --draws together must be at most 1000000, got 1000000 and 1"),
        ({"policy": Path("nowhere")}, "nowhere: no such bundle folder"),
    ],
)
def test_wrong_arguments_are_named(policy: Path, scenario: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(dataclasses.replace(Args(policy=policy, scenario=scenario), **change))  # type: ignore[arg-type]
