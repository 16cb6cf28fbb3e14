"""`helm-rl bench telemetry`: adding up loses nothing, a sample loses a little, and bytes are those of messages sent."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tyro

from envs.serving.cluster import ClusterSim
from eval import bench_telemetry
from eval.bench_telemetry import FULL, SAMPLED_SLOTS, SHARES, WAYS, Args, ByHotUsers, Result, main, measure, scenario_of
from eval.cluster_telemetry import Nodes, Seen, Summarised
from helm_rl import racks
from helm_rl.errors import UserError
from helm_rl.observation import SIZE
from helm_rl.scenario import Scenario
from helm_rl.workloads.generate import generate


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return scenario_of(6, 5.0)


@pytest.fixture(scope="module")
def result(scenario: Scenario) -> Result:
    return measure(scenario, 2, ByHotUsers, 3)


def test_the_load_is_the_base_and_then_the_burst(scenario: Scenario) -> None:
    (phase,) = scenario.load.phase
    assert (phase.start_s, phase.start_s + phase.seconds, scenario.seconds) == (2.0, 5.0, 5.0)
    assert scenario.hardware.nodes == 6
    assert scenario.load.rate == 6 * 67


def test_each_request_counts_once_at_the_node_that_served_it(scenario: Scenario) -> None:
    cluster = ClusterSim(scenario, generate(scenario, 1), max_sampled_slots=SAMPLED_SLOTS)
    nodes, completed = Nodes(cluster), racks._COUNTERS.index("completed")
    seen = 0
    for k in range(6):
        interval = nodes.run(cluster.now_ns + 1_000_000_000)
        assert [one.size for one in interval.latency_ms] == interval.values[:, completed].tolist()
        sums = [float(one.astype(np.float64).sum()) for one in interval.latency_ms]
        np.testing.assert_allclose(sums, interval.values[:, racks._COUNTERS.index("latency_ms_sum")], rtol=1e-6)
        assert (interval.values[:, racks.END_NS] == cluster.now_ns).all()
        seen += sum(one.size for one in interval.latency_ms)
        assert seen > 300 * (k + 1)
    assert seen == np.count_nonzero(np.isfinite(cluster.latency_ms))


def test_adding_up_loses_nothing_and_a_sample_knows_its_error(result: Result) -> None:
    assert list(result.tracks) == list(WAYS)
    for way in ("flat", "racks"):
        np.testing.assert_allclose(result.signal_errors(way), 0.0, atol=1e-6)
        assert result.p99_error(way) == result.alpha_error(way) == 0.0
    for way in SHARES:
        assert 0.001 < result.signal_errors(way).max() < 0.3
        assert result.alpha_error(way) > 0.0
        assert 0.7 < result.bound_held(way) <= 1.0
    assert 0.0 < result.sketch_error < 0.0102
    assert all(len(track.seen) == 5 for track in result.tracks.values())


def test_bytes_are_those_that_were_sent(result: Result) -> None:
    full, flat, through, half = (result.tracks[way].seen for way in (FULL, "flat", "racks", "half"))
    message = 8 * racks.WIDTH
    for k in range(5):
        assert (full[k].centre_bytes - 6 * message) % 4 == 0
        assert full[k].rack_bytes == flat[k].rack_bytes == 0
        assert through[k].rack_bytes == flat[k].centre_bytes > through[k].centre_bytes > 3 * message
        assert 3 * message < half[k].rack_bytes < 0.7 * through[k].rack_bytes
    assert through[0].rack_us > 0.0
    assert flat[0].rack_us == 0.0


@pytest.mark.parametrize(("nodes", "rack_nodes", "share", "counts"), [(10, 4, 0.5, [2, 2, 1]), (6, 2, 0.01, [1, 1, 1])])
def test_some_nodes_of_each_rack_report(nodes: int, rack_nodes: int, share: float, counts: list[int]) -> None:
    way = Summarised(100.0, nodes, rack_nodes, share, 1)
    times = np.zeros(nodes)
    for _ in range(400):
        drawn = way.draw()
        assert np.bincount(drawn // rack_nodes).tolist() == counts
        times[drawn] += 1
    sizes = np.bincount(np.arange(nodes) // rack_nodes)
    expected = (np.array(counts) / sizes)[np.arange(nodes) // rack_nodes]
    np.testing.assert_allclose(times / 400, expected, atol=0.12)


def test_errors_by_hand() -> None:
    def seen(first: float, p99: float, bound: float) -> Seen:
        observation = np.zeros(SIZE, np.float32)
        observation[[0, 6]] = first, p99
        open_ = np.zeros(SIZE)
        open_[0] = bound
        return Seen(observation, open_, 10, 20, 1.0, 2.0, 3.0)

    full = bench_telemetry.Track([seen(0.5, 0.25, 0.0), seen(0.25, 0.5, 0.0)], [0.5, 0.5])
    half = bench_telemetry.Track([seen(0.75, 0.25, 0.3), seen(0.25, 0.75, 0.1)], [0.5, 0.25])
    result = Result(32, {FULL: full, "half": half}, 0.005)
    assert result.signal_errors("half")[[0, 6]].tolist() == [0.125, 0.125]
    assert result.p99_error("half") == 0.25
    assert result.alpha_error("half") == 0.125
    assert result.bound_held("half") == pytest.approx(2 / 3)  # the P99 of the second is off, and its bound is 0
    figures = result.figures()
    assert figures["telemetry.32.half.rack_bytes"].value == 20
    assert figures["telemetry.32.full.centre_us"].value == 3.0
    assert figures["telemetry.32.sketch_error"].goal == pytest.approx(0.01005, abs=1e-5)
    assert "telemetry.32.full.alpha_error" not in figures


def test_the_command_writes_what_its_help_lists(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def stand_in(scenario: Scenario, rack_nodes: int, *_: object) -> Result:
        asked.append((scenario.hardware.nodes, rack_nodes))
        return Result(scenario.hardware.nodes, result.tracks, result.sketch_error)

    monkeypatch.setattr(bench_telemetry, "measure", stand_in)
    path = tmp_path / "f.json"
    main(tyro.cli(Args, args=["--nodes", "32", "64", "--rack-nodes", "4", "--json", str(path)]))
    assert asked == [(32, 4), (64, 4)]
    names = json.loads(path.read_text())["figures"]
    help_text = " ".join((Args.__doc__ or "").split())
    for name in names:
        assert name.startswith("telemetry.")
        assert name.rsplit(".", 1)[1] in help_text, name
    assert len(names) == 2 * (1 + 5 * 6 + 3 * 5 + 3)
    assert "64 nodes, alpha 0.6 to 0.3 by the share of hot users" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "32", "1"], "--nodes 32 1: expected sizes of 2 to 4096"),
        (["--nodes", "5000"], "--nodes 5000: expected"),
        (["--rack-nodes", "0"], "--rack-nodes 0: expected 1 to"),
        (["--seconds", "nan"], "--seconds nan: expected 5 to"),
        (["--policy", "nowhere"], "nowhere: no such bundle folder"),
    ],
)
def test_what_does_not_fit_is_said_at_once(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(tyro.cli(Args, args=arguments))
