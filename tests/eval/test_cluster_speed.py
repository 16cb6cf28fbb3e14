"""Speed of clusters: the load, the figures by hand, and that the measurements measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from eval import cluster_speed
from eval.cluster_speed import NODES, cluster_load, growth_figures, measure_growth, measure_two_cores, plot_growth


def test_the_load() -> None:
    load = cluster_load(32, 60.0)
    assert (load.hardware.nodes, load.load.rate, load.load.users, load.load.requests_per_visit) == (
        32,
        3200,
        12_800_000,
        5,
    )
    assert load.load.phase == ()


def test_growth_by_hand(tmp_path: Path) -> None:
    costs_us = [8.0, 8.0, 8.0, 8.0, 8.0, 10.0, 11.0, 12.0]
    figures = growth_figures(NODES, costs_us)
    assert figures["env.requests_per_s.cluster32"].value == pytest.approx(100_000)
    assert figures["env.cost_growth_1_to_128"].value == pytest.approx(1.5)
    assert figures["env.cost_growth_1_to_128"].goal == 2.0
    assert figures["env.cost_us.64_nodes"].value == 11.0
    plot_growth(NODES, costs_us, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").stat().st_size > 1000


def test_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_speed, "WARM_S", 1.0)
    monkeypatch.setattr(cluster_speed, "LEAST_REQUESTS", 100)
    done: list[None] = []
    costs_us = measure_growth((1, 2), 1, lambda: done.append(None))
    assert all(0.5 < cost < 20_000 for cost in costs_us)
    assert len(done) == 2


def test_two_cores_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of each counts: one cluster in 1 s, two in 1.25 s; arithmetic in 2 s on one thread as on two."""
    monkeypatch.setattr(cluster_speed, "WARM_S", 0.5)
    monkeypatch.setattr(cluster_speed, "THREADED_NODES", 1)
    monkeypatch.setattr(cluster_speed, "ARITHMETIC_STEPS", 10)
    times_s = iter([2.0, 1.25, 2.0, 3.0, 1.0, 1.5, 4.0, 2.0])
    works: list[int] = []
    real = cluster_speed._wall_s

    def wall_s(given: Sequence[Callable[[], object]]) -> float:
        assert real(given) > 0
        works.append(len(given))
        return next(times_s)

    monkeypatch.setattr(cluster_speed, "_wall_s", wall_s)
    served, arithmetic = measure_two_cores(2, lambda: None)
    assert served == pytest.approx(1.6)
    assert arithmetic == pytest.approx(2.0)
    assert works == [1, 2, 1, 2] * 2


def test_an_hour_runs_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster_speed, "HOUR_S", 1.0)
    monkeypatch.setattr(cluster_speed, "WARM_S", 0.5)
    monkeypatch.setattr(cluster_speed, "CLUSTER", 2)
    cluster_speed._serve_hour()
    shown = capsys.readouterr().out
    assert '"requests": ' in shown
    assert '"gb": ' in shown
