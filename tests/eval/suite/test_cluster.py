"""The order in which a cluster's statics are looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from eval.suite.cells import Cell
from eval.suite.cluster import Cluster
from eval.suite.suite import Suite
from eval.suite.tasks import Result
from tests.eval.suite.worlds import small_scenario

BEST = 0.28


def suite_of(store: dict[str, Any]) -> Suite:
    """As much of a suite as a cluster asks for: steps of .4 and .1, results by key, BEST the alpha of least P99."""
    size = SimpleNamespace(step=0.1, cluster_steps=(0.4, 0.1), cluster_numbers=(1,), nodes=2)
    plan = SimpleNamespace(clustered=Cell("decoder", "burst", small_scenario("burst")), size=size)
    prepared = SimpleNamespace(deployable=0.5, whole=0.5, plain=dict)
    needed = store.__getitem__
    return cast(
        Suite,
        SimpleNamespace(
            plan=plan,
            prepared=lambda family: prepared,
            grid=lambda scenario: [k / 10 for k in range(1, 10)],
            needed=lambda result: needed(result.key),
            get=lambda result: store.get(result.key),
        ),
    )


def looked_at(store: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Go through the stages; measure and return what the store lacks."""
    monkeypatch.setattr("eval.suite.cluster.cluster_cpu_s", lambda cell, size: 1.0)
    monkeypatch.setattr(Cluster, "controllers", lambda self: {})
    monkeypatch.setattr("eval.suite.cluster.ROUTERS", ())
    new: list[str] = []
    for stage in Cluster(suite_of(store)).stages():
        results: list[Result[Any]] = list(stage.results)
        for result in results:
            if result.key not in store:
                alpha = float(result.key.rsplit("_", 1)[1])
                store[result.key] = SimpleNamespace(p99_ms=abs(alpha - BEST))
                new.append(f"{alpha:g}")
    return new


def test_statics_are_looked_at_around_the_coarse_best_and_never_further(monkeypatch: pytest.MonkeyPatch) -> None:
    store: dict[str, Any] = {}
    assert looked_at(store, monkeypatch) == ["0.1", "0.5", "0.9", "0.2", "0.3", "0.4"]
    assert looked_at(store, monkeypatch) == []  # .3 is the best by now, and .6 within a coarse step of it
    assert Cluster(suite_of(store)).hindsight(1)[0] == pytest.approx(0.3)
