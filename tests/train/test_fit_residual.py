"""The adapter's measurement: shifted services, false feedback, and the command on a small scenario."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from helm_rl.checkpoint import load_bundle
from helm_rl.control.base import BasePolicy
from helm_rl.control.guard import GuardSettings, Mode, Sums
from helm_rl.control.layers import controller
from helm_rl.control.residual import Residual, lean
from helm_rl.errors import UserError
from helm_rl.export import export
from helm_rl.metrics import WindowStats
from helm_rl.observation import HIGH, SIZE
from helm_rl.scenario import load_scenario
from tests.helm_rl.control.test_guard import SLO_MS, Service, measured
from tests.helm_rl.control.test_residual import BOLD, Toy
from tests.helm_rl.policies import make_bundle, network, still_network
from tests.train.test_on_a_scenario import SCENARIO
from train.fit_residual import FALSIFIED, Args, Feedback, Kept, main, service
from train.variations import _cold_ms


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    make_bundle(tmp_path / "bundle", network(3, scale=0.0))
    return tmp_path / "bundle"


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    longer = SCENARIO.replace("seconds = 40", "seconds = 130")  # two blocks of the adapter's guard
    path.write_text(longer.replace("alpha_max = 0.8", "alpha_max = 0.9"))
    return str(path)


def test_a_shifted_service_is_about_as_hard() -> None:
    plain = service(Args(policy=Path("none")))
    assert plain == load_scenario("trend")
    shifted = service(Args(policy=Path("none"), hardware="h200", link_gb_s=0.2, zipf_items=0.9))
    assert (shifted.hardware.profile, shifted.hardware.link_gb_s, shifted.load.zipf_items) == ("h200", 0.2, 0.9)
    busy = [[ms * each.load.rate for ms in _cold_ms(each)] for each in (plain, shifted)]
    assert max(new / old for old, new in zip(*busy, strict=True)) == pytest.approx(1.0)


def served() -> list[WindowStats]:
    """Return windows that differ in all that an adapter looks at; in the first nothing has been served yet."""
    rng = np.random.default_rng(1)
    found = [measured(100, math.nan, completed=0)]
    for p99_ms in rng.lognormal(4, 0.5, 300):
        busy = rng.integers(1, 10**9, 2).tolist()
        emb_ms, kv_ms = rng.lognormal(0, 0.5, 2).tolist()
        margins = {"emb_margin_ms": emb_ms, "kv_margin_ms": kv_ms, "kv_margin_link_ms": kv_ms / 4}
        found.append(measured(100, p99_ms, link_busy_ns=busy[0], compute_busy_ns=busy[1], **margins))
    return found


def told(policy: Path, feedback: Feedback, windows: list[WindowStats]) -> list[WindowStats]:
    """Return what an adapter is told where `windows` were measured."""
    adapter = Residual(BasePolicy.load(policy))
    kept = Kept(adapter, feedback, 1)
    seen: list[WindowStats] = []
    adapter.feedback = seen.append  # type: ignore[method-assign]
    for window in windows:
        kept.feedback(window)
    return seen


def column(windows: list[WindowStats], name: str) -> np.ndarray:
    return np.log([getattr(window, name) for window in windows[1:]])


def leans(windows: list[WindowStats]) -> np.ndarray:
    found = []
    for window in windows[1:]:
        sums = Sums()
        sums.add(window, 0.5)
        found.append(lean(sums))
    return np.array(found)


def test_true_feedback_is_what_was_measured(policy: Path) -> None:
    windows = served()
    assert told(policy, "true", windows)[1:] == windows[1:]


@pytest.mark.parametrize("feedback", ["constant", "random", "inverted", "swapped"])
def test_false_feedback_is_false_in_what_it_should_be(policy: Path, feedback: Feedback) -> None:
    windows = served()
    found = told(policy, feedback, windows)
    p99, claimed = column(windows, "p99_ms"), column(found, "p99_ms")
    for window, one in zip(windows, found, strict=True):  # how much was served stays true
        assert (one.arrivals, one.completed, one.end_ns) == (window.arrivals, window.completed, window.end_ns)
    if feedback == "constant":
        assert set(found[1:]) == {windows[1]}
    elif feedback == "random":
        for name in FALSIFIED:
            assert abs(np.corrcoef(column(windows, name), column(found, name))[0, 1]) < 0.2
            assert column(found, name).std() > 0.5
    elif feedback == "inverted":
        np.testing.assert_allclose(claimed - p99[0], p99[0] - p99)
        on_the_link = [dataclasses.replace(each, kv_margin_link_ms=0.0) for each in windows]
        np.testing.assert_allclose(leans(found), -leans(on_the_link), atol=1e-9)
    else:
        np.testing.assert_array_equal(claimed, p99)
        assert np.corrcoef(leans(found), leans(windows))[0, 1] < -0.9


@pytest.mark.parametrize("feedback", ["true", "constant", "random", "inverted", "swapped"])
def test_only_true_latencies_let_it_act(tmp_path: Path, feedback: Feedback) -> None:
    """With true latencies and the contrary of what pages are worth it goes the wrong way, until latency tells."""
    make_bundle(tmp_path / "still", still_network())
    guard = GuardSettings(sample_s=1.0, block_s=6.0, settle_s=2.0)
    adapter = Residual(BasePolicy.load(tmp_path / "still"), dataclasses.replace(BOLD, bound=0.1, stride=0.1), guard)
    kept, service, toy = Kept(adapter, feedback, 1), Service(1, noise=0.1), Toy(1.0)
    obs = np.full(SIZE, 0.5, np.float32)
    ways = []
    for k in range(600):
        toy.alpha = obs[5] = kept.decide(obs, toy.alpha, k)
        window = toy.measure(*service.next())
        obs[6] = min(window.p99_ms / SLO_MS, HIGH[6])
        kept.feedback(window)
        ways.append(adapter.offset)
    if feedback == "true":
        assert max(ways[-100:]) == pytest.approx(0.05, abs=0.01)
    elif feedback == "swapped":
        assert min(ways) < -0.04
        assert max(ways) == 0.0
    else:
        assert set(ways) == {0.0}
    assert (adapter.guard.mode is Mode.REST) == (feedback != "true")


def test_what_was_learnt_survives_the_start_of_a_replay(policy: Path) -> None:
    adapter = Residual(BasePolicy.load(policy))
    adapter.net.weights[2][:] = 1.0
    Kept(adapter, "true", 1).reset(7)
    assert (adapter.net.weights[2] == 1.0).all()


def test_the_command_measures_both_and_without_a_bound_they_are_the_same(
    policy: Path, scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = Args(policy=policy, scenario=scenario, intervals=100, draws=1, bound=0.0, json=tmp_path / "f.json")
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
    assert served.adapter.learnt().guard.cost.seen > 10


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
